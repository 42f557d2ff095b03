"""Where others can meet a worker: a place of all workers of a host, or a door that it opens itself."""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from torch._C import _distributed_c10d as c10d

from unisono.comm.rendezvous import Rendezvous, listen, own_address, parse_rendezvous
from unisono.errors import InvalidInput

_TIMEOUT = timedelta(seconds=60)


class Door:
    """A meeting place, as long as it is open.

    Attributes:
        url: see `unisono.comm.rendezvous`; `at_attempt` makes it that of one of many meetings.
    """

    def __init__(self, url: str, store: c10d.Store | None = None) -> None:
        self.url, self._store = url, store

    def close(self) -> None:
        """Nobody can meet here any more, if it was this worker who served. May be called twice."""
        self._store = None


def open_door(meets_at: str, towards: str) -> Door:
    """The place `meets_at`, or, where that is empty, one that this worker serves on a free port of the address by which
    `towards` is reached, and on no other.

    Raises:
        InvalidInput: `meets_at` is no place, or `towards` no URL with a host.
    """
    if meets_at:
        parse_rendezvous(meets_at)
        return Door(meets_at)
    parts = urlsplit(towards)
    if not parts.hostname:
        raise InvalidInput("towards", towards, "has no host", "write http://host:port")
    address = own_address(Rendezvous(host=parts.hostname, port=parts.port or 80))
    wire = listen(Rendezvous(host=address))
    with socket.fromfd(wire, socket.AF_INET, socket.SOCK_STREAM) as listening:
        port = listening.getsockname()[1]
    store = c10d.TCPStore(address, port, None, True, _TIMEOUT, wait_for_workers=False, master_listen_fd=wire)
    shown = f"[{address}]" if ":" in address else address
    return Door(f"tcp://{shown}:{port}?served=1", store)


def host_name() -> str:
    """A name that only those processes have in common that share memory and loopback: of one boot of one kernel, with
    the same network and processes, and of one user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user")]
    except OSError:  # nor is there memory to share
        boot, spaces = f"{uuid.getnode()}", [socket.gethostname()]
    return hashlib.sha256("\n".join([boot, *spaces, str(os.getuid())]).encode()).hexdigest()[:16]
