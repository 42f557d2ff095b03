"""torch's default process group: what its own ways to cut a model talk through, and what they have sent."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from unisono.comm.torch_group import Device, gloo
from unisono.errors import PeerLost

_BACKEND = "unisono"  # gloo on a device that is given: torch's own asks the environment for it
_BYTES_ACKED = 120  # the offset of tcpi_bytes_acked in Linux' struct tcp_info (since 4.1)


class TorchWorld:
    """All workers of a run in torch's default group, and every group that torch makes of some of them.

    Args:
        address: this worker's, as the others reach it.

    Raises:
        PeerLost: not all of them came within the deadline.
    """

    def __init__(
        self, store: c10d.Store, rank: int, size: int, address: str, device: torch.device, deadline_seconds: float
    ) -> None:
        self._address, self._sockets = address, set[tuple[int, int]]()
        dist.Backend.register_backend(_BACKEND, self._group, devices=["cpu"])
        try:
            dist.init_process_group(
                f"cpu:{_BACKEND},cuda:nccl" if device.type == "cuda" else _BACKEND,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=deadline_seconds),
            )
        except RuntimeError as error:
            raise PeerLost([], "connect", str(error).splitlines()[0]) from error

    @property
    def bytes_sent(self) -> int:
        """What has left this worker through gloo's connections and arrived, as the kernel counts it, with gloo's own
        headers; NCCL's is not known."""
        return sum(_arrived(*each) for each in self._sockets)

    def _group(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Any:
        """As torch asks a backend for each group; gloo connects all pairs at once."""
        before = _sockets()
        group = gloo(store, rank, size, Device.open(self._address), timeout.total_seconds())
        self._sockets |= _sockets() - before
        return group


def _sockets() -> set[tuple[int, int]]:
    """This process's, by descriptor and inode: a descriptor may come to mean another one."""
    found = set()
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _arrived(descriptor: int, inode: int) -> int:
    """Bytes that the peer has acknowledged; 0 for what is not, or no longer, a connection over TCP."""
    try:
        if os.fstat(descriptor).st_ino != inode:
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
    except OSError:
        return 0
    return int.from_bytes(told[_BYTES_ACKED:], sys.byteorder) if len(told) == _BYTES_ACKED + 8 else 0
