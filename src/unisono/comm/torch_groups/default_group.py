"""torch's default process group: what its own ways to cut a model talk through, and what they have sent."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from unisono.comm.abort import Abort
from unisono.comm.process_sockets import connected, deafen, is_open, shut
from unisono.comm.rendezvous.prefix_store import PrefixedStore
from unisono.comm.rendezvous.store_exchange import AbortableStore, StoreExchange
from unisono.comm.torch_groups.process_group import gloo, open_devices
from unisono.errors import CommunicationError, PeerLost

LOG = logging.getLogger("unisono")
STUCK = 70  # how a process ends that could not be woken
_LINGER_SECONDS = 2.0  # far longer than it takes until all have heard that a view is over
_LET_GO_SECONDS = 5.0  # for one call, which fails within milliseconds
_LOOK_SECONDS = 0.5
_BACKEND = "unisono"  # gloo on a device that is given: torch's own asks the environment for it
_BYTES_SENT = 200  # the offset of tcpi_bytes_sent in Linux' struct tcp_info (since 4.19); tcpi_bytes_retrans follows


class TorchWorld:
    """All workers of a view in torch's default group, and every group that torch makes of some of them.

    A process has one at a time. What waits in its groups listens to nobody: it is woken by the end of what can be read
    from their connections, and whatever torch then raises is said as `PeerLost` by `translate_errors`.

    Where a write fails in gloo's own thread, which answers a message that says that the far end is ready, gloo seems to
    forget whoever waits for that. So nobody's connections close before all have had time to hear that it is over. They
    do where a process dies: one that stays in a call of torch's thereafter ends, so that another can take its place; so
    does one that has not closed this within the deadline, once it was broken off.

    Args:
        address: this worker's, as the others reach it.
        abort: breaks off all that waits, now and later.

    Raises:
        PeerLost: not all of them came within the deadline, or it was broken off.
    """

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        size: int,
        address: str,
        device: torch.device,
        timeout_seconds: float,
        abort: Abort | None = None,
    ) -> None:
        self._address, self._timeout_seconds = address, timeout_seconds
        self._abort, self._wires, self._lock = abort or Abort(), dict[int, str](), threading.Lock()
        self._stores: list[c10d.Store] = [store]  # torch and gloo have only what C++ knows of them
        gc.collect()  # modules that talked through the groups of the world before lie in circles
        # torch names a group by the number of groups begun before it. A group that could not be made still counts, in
        # this process alone: the names, and with them the keys in the store, would differ from those of new workers.
        dist.distributed_c10d._world.group_count = 0
        self._closed, self._thread = threading.Event(), threading.get_ident()
        self._unabort = self._abort.add_callback(self._break_off)
        dist.Backend.register_backend(_BACKEND, self._group, devices=["cpu"])
        try:
            dist.init_process_group(
                f"cpu:{_BACKEND},cuda:nccl" if device.type == "cuda" else _BACKEND,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_seconds),
            )
        except RuntimeError as error:
            self.close()
            raise PeerLost([], "connect", str(error).splitlines()[0]) from error
        except BaseException:
            self.close()
            raise

    @property
    def bytes_sent(self) -> int:
        """What has left this worker through gloo's connections, each byte once, as the kernel counts it, with gloo's
        own headers; NCCL's is not known."""
        return sum(_sent(*wire) for wire in self._wires.items())

    @property
    def failure(self) -> str:
        """Why nothing can be said here any more; empty as long as all connections are there."""
        closed = not all(is_open(*wire) for wire in self._wires.items())
        return self._abort.reason or ("a connection was closed" if closed else "")

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Inside, what is raised because others are not there any more is raised as `PeerLost`: torch says it as a
        plain RuntimeError, and wraps what our own communicators say."""
        try:
            yield
        except CommunicationError:
            raise
        except Exception as error:
            meant = _meant(error)
            if meant is not None:
                raise meant from error
            why = self.failure if isinstance(error, RuntimeError) else ""
            if why:
                raise PeerLost([], "layout", f"{why} ({repr(error).splitlines()[0]})") from error
            raise

    def close(self) -> None:
        """Leave all groups, so that others may be made; who waits for it in one of them is woken soon after."""
        self._unabort()
        self._deafen()
        self._closed.set()
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_meshes()

    def _deafen(self) -> None:
        with self._lock, contextlib.ExitStack() as kept:
            for wire in deafen(self._wires):
                kept.enter_context(wire)
            later = threading.Timer(_LINGER_SECONDS, kept.pop_all().close)
            later.daemon = True
            later.start()

    def _break_off(self) -> None:
        self._deafen()
        threading.Thread(target=self._end_if_stuck, name="torch world, broken off", daemon=True).start()
        if dist.is_initialized() and torch.cuda.is_available():
            _abort_nccl()

    def _end_if_stuck(self) -> None:
        began, call, since = time.monotonic(), None, 0.0
        while not self._closed.wait(_LOOK_SECONDS):
            now, before, call = time.monotonic(), call, _call_of(self._thread)
            since = since if call is not None and call == before else now
            if now - since > _LET_GO_SECONDS or now - began > self._timeout_seconds:
                LOG.critical("torch's groups did not let go for %.3g s: this process ends", now - began)
                os._exit(STUCK)

    def _group(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Any:
        """As torch asks a backend for each group; gloo connects all pairs at once."""
        notices = StoreExchange(store, self._timeout_seconds, self._abort)
        (device,), ends = open_devices(notices, rank, size, self._address, 1)
        waiting = AbortableStore(PrefixedStore("gloo", store), self._timeout_seconds, self._abort)
        forget = self._abort.add_callback(lambda: shut(connected(ends)))
        try:
            made = partial(gloo, waiting, rank, size, device, timeout.total_seconds())
            group = self._abort.run("connect", made)
        except RuntimeError as error:
            raise PeerLost([], "connect", str(error).splitlines()[0]) from error
        finally:
            forget()
        with self._lock:
            self._wires |= connected(ends)
        self._abort.check("connect")
        self._stores.append(waiting)
        return group


def _call_of(thread: int) -> tuple[int, int] | None:
    """The call of `torch.distributed` that a thread is in; None where it is elsewhere."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.endswith("torch/_ops.py"):
        frame = frame.f_back  # on the way to what is not Python
    if frame is None or "/torch/distributed/" not in frame.f_code.co_filename:
        return None
    return id(frame), frame.f_lasti


def _meant(error: BaseException | None) -> CommunicationError | None:
    """What one of our own communicators said, where somebody else's code has wrapped it."""
    while error is not None and not isinstance(error, CommunicationError):
        error = error.__cause__ or error.__context__
    return error


def _forget_meshes() -> None:
    """torch remembers how operations are spread by meshes that count as equal to those of the next groups, but would
    talk through the former ones."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()


def _abort_nccl() -> None:
    for group in list(dist.distributed_c10d._world.pg_names):
        with contextlib.suppress(RuntimeError):  # it has no part on a GPU
            group._get_backend(torch.device("cuda")).abort()


def _sent(descriptor: int, name: str) -> int:
    """Bytes that went to the peer, without those that went again; 0 for what is not, or no longer, a connection over
    TCP. What was acknowledged would be less: an acknowledgement may come long after the peer has read."""
    try:
        if not is_open(descriptor, name):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT + 16)
    except OSError:
        return 0
    if len(told) < _BYTES_SENT + 16:
        return 0
    sent, again = struct.unpack_from("=QQ", told, _BYTES_SENT)
    return int(sent) - int(again)
