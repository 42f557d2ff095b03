"""The process groups of torch through which one channel communicates, from connecting to closing."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from unisono.comm.abort import Abort
from unisono.comm.process_sockets import connections_of, is_open, shut_down
from unisono.comm.rendezvous.prefix_store import PrefixedStore
from unisono.comm.rendezvous.store_exchange import AbortableStore, StoreExchange
from unisono.comm.torch_groups.gloo import GlooDevice, connect_gloo, open_devices
from unisono.errors import InvalidInput, PeerLost

_UNWIND_SECONDS = 1.0


class BackendGroups:
    """The process groups of torch that one channel uses. Collective: the constructor connects them.

    Args:
        store: a store that the workers share, without keys of an earlier group.
        rank, size, backend, device, address, timeout_seconds: as for `TorchGroup`.
        abort: once set, all waiting in the groups ends.

    Attributes:
        headers: the group that transfers headers, over gloo.
        connections: the kernel's name of each connection of gloo, by descriptor.

    Raises:
        PeerLost: not all peers connected within the deadline, or `abort` was set.
        InvalidInput: this build of torch has no such backend.
    """

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        size: int,
        *,
        backend: str,
        device: torch.device,
        address: str,
        timeout_seconds: float,
        abort: Abort,
    ) -> None:
        _check_backend(backend)
        self._rank, self._size, self._backend, self._device = rank, size, backend, device
        self._timeout_seconds, self._abort = timeout_seconds, abort
        self._in_flight: deque[Any] = deque()
        self._abortable = AbortableStore(store, timeout_seconds, abort)  # gloo refers to its C++ part only
        exchange = StoreExchange(store, timeout_seconds, abort)
        devices, ends = open_devices(exchange, rank, size, address, 3 if backend == "nccl" else 2)
        remove = abort.add_callback(lambda: shut_down(connections_of(ends)))
        try:
            with raise_peer_lost("connect"):
                groups = abort.run("connect", partial(self._connect, store, devices))
        finally:
            remove()
        self.headers, self._payloads, self._cpu_payloads = groups
        self.connections = connections_of(ends)
        self._remove_callback: Callable[[], None] = lambda: None
        if backend == "nccl":  # operations of NCCL also block callers that wait for the device
            self._remove_callback = abort.add_callback(self._payloads.abort)

    @property
    def all_open(self) -> bool:
        """Whether all connections of gloo are open."""
        return all(is_open(fd, name) for fd, name in self.connections.items())

    def carrying(self, x: Tensor) -> Any:
        """The group for payloads on the device of `x`."""
        return self._cpu_payloads if x.device.type == "cpu" else self._payloads

    def track(self, handle: Any) -> Any:
        """Remember `handle` as in flight; returns it."""
        while self._in_flight and self._in_flight[0].is_completed():
            self._in_flight.popleft()
        self._in_flight.append(handle)
        return handle

    def close(self) -> None:
        """Release the groups. May be called twice.

        Before that, the sockets are shut down. This ends the operations in flight here, and wakes peers that wait for
        this worker.
        """
        self._remove_callback()
        shut_down(self.connections)
        self.connections = {}
        if self._backend == "nccl" and self._payloads is not None:
            self._payloads.abort()
        if not self._unwound():
            # The destructor of a group waits for the operations in flight, here forever: leak the groups instead.
            for each in (self.headers, self._payloads, self._cpu_payloads, self._abortable):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        self.headers = self._payloads = self._cpu_payloads = None
        self._in_flight.clear()

    def _unwound(self) -> bool:
        """Whether all operations in flight have ended, now that the connections are shut down."""
        end = time.monotonic() + _UNWIND_SECONDS
        while not all(handle.is_completed() for handle in self._in_flight):
            if time.monotonic() > end:
                return False
            time.sleep(1e-3)
        return True

    def _connect(self, store: c10d.Store, devices: Sequence[GlooDevice]) -> tuple[Any, Any, Any]:
        """The groups for headers, for payloads, and for payloads on the CPU."""

        def over_gloo(name: str, device: GlooDevice) -> Any:
            self._abort.check("connect")
            named = PrefixedStore(name, self._abortable)
            return connect_gloo(named, self._rank, self._size, device, self._timeout_seconds)

        headers = over_gloo("headers", devices[0])
        if self._backend == "gloo":
            payloads = over_gloo("payloads", devices[1])
            return headers, payloads, payloads
        return headers, self._nccl(PrefixedStore("payloads", store)), over_gloo("near", devices[2])

    def _nccl(self, store: c10d.Store) -> Any:
        process_group: Any = c10d.ProcessGroupNCCL
        options = process_group.Options()
        options._timeout = timedelta(seconds=self._timeout_seconds)
        with torch.cuda.device(self._device):
            return process_group(store, self._rank, self._size, options)


@contextmanager
def raise_peer_lost(verb: str) -> Iterator[None]:
    """A context that raises the errors of backends, which are RuntimeErrors without a rank, as `PeerLost`."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost((), verb, str(error).splitlines()[0]) from error


def _check_backend(backend: str) -> None:
    if backend != "gloo" and not (backend == "nccl" and hasattr(c10d, "ProcessGroupNCCL")):
        raise InvalidInput("backend", backend, "this build of torch does not have it", "write gloo")
