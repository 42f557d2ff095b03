"""torch's default process group, for torch's own parallel layers, with a count of the bytes that it has sent."""

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
from unisono.comm.process_sockets import connections_of, is_open, shut_down, shut_reading
from unisono.comm.rendezvous.prefix_store import PrefixedStore
from unisono.comm.rendezvous.store_exchange import AbortableStore, StoreExchange
from unisono.comm.torch_groups.gloo import connect_gloo, open_devices
from unisono.errors import CommunicationError, PeerLost

LOG = logging.getLogger("unisono")
STUCK = 70  # exit status of a process that could not be woken
_LINGER_SECONDS = 2.0  # far longer than it takes until all workers know that a view has ended
_STUCK_SECONDS = 5.0  # how long one call may last after an abort, which ends other calls within milliseconds
_CHECK_SECONDS = 0.5
_BACKEND = "unisono"  # gloo on a given device: torch's own takes it from the environment
_BYTES_SENT = 200  # the offset of tcpi_bytes_sent in Linux' struct tcp_info (since 4.19); tcpi_bytes_retrans follows


class TorchWorld:
    """torch's default process group, of all workers of a view, and every group that torch makes of some of them.

    A process has one such world at a time. torch's waiting cannot be aborted. Instead, workers are woken by ending the
    reading side of the connections, and `translate_errors` converts what torch then raises to `PeerLost`.

    If a write fails in gloo's own thread, which answers that this end is ready, gloo seems to forget the operation
    that waits for it. So connections are closed only after all workers have had time to learn that the view has ended.
    The connections of a process that exits close at once, however. So after an abort, a worker exits if it stays in one
    call of torch for 5 s, or has not closed this world within `timeout_seconds`; another worker can then replace it.

    Args:
        address: the address of this worker, as its peers reach it.
        abort: once set, all waiting ends.

    Raises:
        PeerLost: not all workers connected within the deadline, or `abort` was set.
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
        self._abort, self._connections, self._lock = abort or Abort(), dict[int, str](), threading.Lock()
        self._stores: list[c10d.Store] = [store]  # kept, as torch and gloo refer to their C++ parts only
        gc.collect()  # modules that used the groups of the previous world are in reference cycles
        # torch names a group by the number of groups made before it. A group that failed still counts, in this process
        # alone: its names of groups, and with them its keys in the store, would differ from those of new workers.
        dist.distributed_c10d._world.group_count = 0
        self._closed, self._thread = threading.Event(), threading.get_ident()
        self._remove_callback = self._abort.add_callback(self._on_abort)
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
        """Bytes sent through gloo's connections, without retransmissions, as the kernel counts them.

        They include gloo's own headers. The bytes of NCCL are not known.
        """
        return sum(_sent(*connection) for connection in self._connections.items())

    @property
    def failure(self) -> str:
        """Why the groups cannot be used any more; empty while all connections are open."""
        closed = not all(is_open(*connection) for connection in self._connections.items())
        return self._abort.reason or ("a connection was closed" if closed else "")

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """A context that raises the errors with which torch reports a lost peer as `PeerLost`.

        torch reports a lost peer by a plain RuntimeError, and wraps errors of this library's communicators.
        """
        try:
            yield
        except CommunicationError:
            raise
        except Exception as error:
            cause = _cause(error)
            if cause is not None:
                raise cause from error
            failure = self.failure if isinstance(error, RuntimeError) else ""
            if failure:
                raise PeerLost([], "layout", f"{failure} ({repr(error).splitlines()[0]})") from error
            raise

    def close(self) -> None:
        """Leave all groups, so that new ones can be made. Peers that wait in the groups are woken soon after."""
        self._remove_callback()
        self._end_reading()
        self._closed.set()
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_meshes()

    def _end_reading(self) -> None:
        """Wake all threads that read from the connections, and close the connections a while later."""
        with self._lock, contextlib.ExitStack() as open_until:
            for sock in shut_reading(self._connections):
                open_until.enter_context(sock)
            later = threading.Timer(_LINGER_SECONDS, open_until.pop_all().close)
            later.daemon = True
            later.start()

    def _on_abort(self) -> None:
        self._end_reading()
        threading.Thread(target=self._exit_if_stuck, name="torch world, aborted", daemon=True).start()
        if dist.is_initialized() and torch.cuda.is_available():
            _abort_nccl()

    def _exit_if_stuck(self) -> None:
        aborted_at, call, since = time.monotonic(), None, 0.0
        while not self._closed.wait(_CHECK_SECONDS):
            now, before, call = time.monotonic(), call, _call_of(self._thread)
            since = since if call is not None and call == before else now
            if now - since > _STUCK_SECONDS or now - aborted_at > self._timeout_seconds:
                LOG.critical("the view ended %.3g s ago, and a call of torch.distributed has not returned: "
                             "this process exits", now - aborted_at)  # fmt: skip
                os._exit(STUCK)

    def _group(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Connect the group that torch requests from this backend; gloo connects all pairs of workers at once."""
        exchange = StoreExchange(store, self._timeout_seconds, self._abort)
        (device,), ends = open_devices(exchange, rank, size, self._address, 1)
        abortable = AbortableStore(PrefixedStore("gloo", store), self._timeout_seconds, self._abort)
        remove = self._abort.add_callback(lambda: shut_down(connections_of(ends)))
        try:
            connect = partial(connect_gloo, abortable, rank, size, device, timeout.total_seconds())
            group = self._abort.run("connect", connect)
        except RuntimeError as error:
            raise PeerLost([], "connect", str(error).splitlines()[0]) from error
        finally:
            remove()
        with self._lock:
            self._connections |= connections_of(ends)
        self._abort.check("connect")
        self._stores.append(abortable)
        return group


def _call_of(thread: int) -> tuple[int, int] | None:
    """The call of `torch.distributed` that a thread is in; None if the thread is in other code."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.endswith("torch/_ops.py"):
        frame = frame.f_back  # the wrapper of an operator in C++
    if frame is None or "/torch/distributed/" not in frame.f_code.co_filename:
        return None
    return id(frame), frame.f_lasti


def _cause(error: BaseException | None) -> CommunicationError | None:
    """The error of one of this library's communicators that torch has wrapped, if any."""
    while error is not None and not isinstance(error, CommunicationError):
        error = error.__cause__ or error.__context__
    return error


def _forget_meshes() -> None:
    """Clear torch's caches that are keyed by device mesh: a new mesh equals an old one whose groups are closed."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()


def _abort_nccl() -> None:
    for group in list(dist.distributed_c10d._world.pg_names):
        with contextlib.suppress(RuntimeError):  # the group has no backend for GPUs
            group._get_backend(torch.device("cuda")).abort()


def _sent(descriptor: int, name: str) -> int:
    """Bytes sent to the peer without retransmissions; 0 unless the descriptor is still this TCP connection.

    The count of acknowledged bytes would be lower: an acknowledgement may arrive long after the peer has read.
    """
    try:
        if not is_open(descriptor, name):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT + 16)
    except OSError:
        return 0
    if len(info) < _BYTES_SENT + 16:
        return 0
    sent, again = struct.unpack_from("=QQ", info, _BYTES_SENT)
    return int(sent) - int(again)
