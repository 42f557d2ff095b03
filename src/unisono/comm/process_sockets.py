"""This process's connections that belong to somebody else's code, found by where they lead.

A library that connects processes may neither say which sockets it has opened nor close them while it waits. They are
known by their ends: other threads open sockets of their own at the same time, which are none of ours to close.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from unisono.comm.packet_filter import DROP, LARGEST, admitting

_OLDER_FAMILY = "::ffff:"
End = tuple[str, int]
"""Address and port."""


def read_end(told: Any) -> End:
    """An end as JSON carries it, a list. Raises `ValueError` or `TypeError` for anything else."""
    address, port = told
    return str(address), int(port)


def listening(address: str) -> frozenset[End]:
    """Where this process listens on `address`."""
    return frozenset(here for fd in _sockets() if (here := _end(fd, _listens_at)) and here[0] == address)


def refuse_connections(end: End) -> None:
    """Have the kernel drop every packet to this process's listening socket at `end`. Connections that exist stay. It is
    a socket filter of Linux, which needs no privilege; elsewhere the call has no effect."""
    _filter(end, [DROP])


def admit_only(addresses: Collection[str], end: End) -> None:
    """Have the kernel drop packets to this process's listening socket at `end`, but those from `addresses`; as
    `refuse_connections`, which may follow. No effect where the kernel has no room for so long a program: at
    20 kB for each socket, the least that is usual (``net.core.optmem_max``), those are some 800 addresses."""
    _filter(end, admitting(addresses))


def _filter(end: End, program: Sequence[bytes]) -> None:
    code = ctypes.create_string_buffer(b"".join(program))
    described = struct.pack("@HP", min(len(program), LARGEST + 1), ctypes.addressof(code))
    for fd in _sockets():
        if _end(fd, _listens_at) == end:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as wire:
                wire.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)


_SO_ATTACH_FILTER = 26


def connected(ends: Collection[End]) -> dict[int, str]:
    """Connections from or to one of `ends`, by descriptor, with the kernel's name for each."""
    return {
        fd: name
        for fd, name in _sockets().items()
        if (there := _peer(fd)) and (there in ends or _end(fd, socket.socket.getsockname) in ends)
    }


def towards(end: End) -> dict[int, str]:
    """Connections to `end`, as `connected` says them; not those that it has accepted, if it is in this process."""
    return {fd: name for fd, name in _sockets().items() if _peer(fd) == end}


def is_open(fd: int, name: str) -> bool:
    """Whether `fd` is still the socket called `name`."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == name
    except OSError:
        return False


def shut(wires: Mapping[int, str]) -> None:
    """Shut these connections down, which wakes whoever waits for them, where they are still what they were called: a
    number may belong to another by now."""
    for wire in _still(wires):
        with wire, contextlib.suppress(OSError):  # its other end is gone: it carries nothing any more
            wire.shutdown(socket.SHUT_RDWR)


def deafen(wires: Mapping[int, str]) -> list[socket.socket]:
    """Have whoever reads from these connections come to their end, behind what has arrived, where they are still what
    they were called. Until what is returned is closed the far ends notice nothing of it, nor of what is done to the
    connections here, and may be written to."""
    kept = list(_still(wires))
    for wire in kept:
        with contextlib.suppress(OSError):
            wire.shutdown(socket.SHUT_RD)
    return kept


def _still(wires: Mapping[int, str]) -> Iterator[socket.socket]:
    """Those that are there and connected, each once more."""
    for fd, name in wires.items():
        try:
            wire = socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            continue  # closed already
        # One that listens is none of those: shutting that down would abort the process.
        if is_open(wire.fileno(), name) and _peer(wire.fileno()):
            yield wire
        else:
            wire.close()


def _sockets() -> dict[int, str]:
    """All of this process's, by number; empty where /proc is not there."""
    found: dict[int, str] = {}
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for number in numbers:
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # closed meanwhile
        if name.startswith("socket:"):
            found[int(number)] = name
    return found


def _peer(fd: int) -> End | None:
    return _end(fd, socket.socket.getpeername)


def _listens_at(wire: socket.socket) -> Any:
    """Raises `OSError` where it does not: a connection that has ended has no far end either, and does not listen."""
    if not wire.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise OSError("it is a connection, or was one")
    return wire.getsockname()


def _end(fd: int, which: Callable[[socket.socket], Any]) -> End | None:
    """One end of the socket `fd`; None where it has none, or none on a network."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None  # closed meanwhile
    try:
        wire = socket.socket(fileno=copy)  # of the family that it has: the addresses of one do not fit into another's
    except OSError:
        os.close(copy)
        return None
    try:
        found = which(wire)
    except OSError:
        return None
    finally:
        wire.close()
    if not isinstance(found, tuple) or len(found) < 2:
        return None
    # A socket of both families writes the addresses of the older one in its own way.
    return found[0].removeprefix(_OLDER_FAMILY), found[1]
