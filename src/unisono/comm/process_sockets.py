"""Sockets that a library has opened in this process, found by their addresses.

A library that connects processes, such as gloo, may neither report its sockets nor close them while it waits. Its
sockets are recognized by the addresses of their ends, as other threads open unrelated sockets at the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from unisono.comm.packet_filter import DROP, LARGEST, drop_all_but

_IPV4_MAPPED = "::ffff:"
End = tuple[str, int]
"""Address and port."""


def read_end(value: Any) -> End:
    """The address and port in `value`, a list read from JSON. Raises `ValueError` or `TypeError` for other values."""
    address, port = value
    return str(address), int(port)


def listening_ends(address: str) -> frozenset[End]:
    """Address and port of each socket with which this process listens on `address`."""
    return frozenset(here for fd in _sockets() if (here := _end(fd, _listening_address)) and here[0] == address)


def refuse_connections(end: End) -> None:
    """Have the kernel drop every packet to this process's listening socket at `end`; existing connections stay.

    This is a socket filter of Linux, which needs no privilege. On other systems the call has no effect.
    """
    _filter(end, [DROP])


def admit_only(addresses: Collection[str], end: End) -> None:
    """Have the kernel drop packets to this process's listening socket at `end`, except those from `addresses`.

    This is a socket filter, as in `refuse_connections`, which may be called later. It has no effect if its program is
    too long for the kernel: the smallest usual ``net.core.optmem_max``, 20 kB per socket, allows about 800 addresses.
    """
    _filter(end, drop_all_but(addresses))


def _filter(end: End, program: Sequence[bytes]) -> None:
    code = ctypes.create_string_buffer(b"".join(program))
    described = struct.pack("@HP", min(len(program), LARGEST + 1), ctypes.addressof(code))
    for fd in _sockets():
        if _end(fd, _listening_address) == end:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)


_SO_ATTACH_FILTER = 26


def connections_of(ends: Collection[End]) -> dict[int, str]:
    """This process's connections from or to one of `ends`: the kernel's name of each socket, by descriptor."""
    return {
        fd: name
        for fd, name in _sockets().items()
        if (there := _peer(fd)) and (there in ends or _end(fd, socket.socket.getsockname) in ends)
    }


def connections_to(end: End) -> dict[int, str]:
    """The connections that this process has opened to `end`, in the form of `connections_of`."""
    return {fd: name for fd, name in _sockets().items() if _peer(fd) == end}


def is_open(fd: int, name: str) -> bool:
    """Whether `fd` is still the socket with the kernel's name `name`."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == name
    except OSError:
        return False


def shut_down(connections: Mapping[int, str]) -> None:
    """Shut connections down, which wakes threads that wait for them.

    Descriptors that by now belong to other sockets are left alone.
    """
    for sock in _still_open(connections):
        with sock, contextlib.suppress(OSError):  # the connection has ended already
            sock.shutdown(socket.SHUT_RDWR)


def shut_reading(connections: Mapping[int, str]) -> list[socket.socket]:
    """End the reading side of connections: readers see the end of the stream after what has arrived.

    The other ends notice nothing, and can still write, until the returned duplicates of the sockets are closed. This
    holds even if the connections themselves are closed in this process. Descriptors that by now belong to other
    sockets are left alone.
    """
    duplicates = list(_still_open(connections))
    for sock in duplicates:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RD)
    return duplicates


def _still_open(connections: Mapping[int, str]) -> Iterator[socket.socket]:
    """Yield a duplicate of each of `connections` that is still open and connected."""
    for fd, name in connections.items():
        try:
            sock = socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            continue  # closed already
        # A listening socket must be skipped: to shut it down would abort the process.
        if is_open(sock.fileno(), name) and _peer(sock.fileno()):
            yield sock
        else:
            sock.close()


def _sockets() -> dict[int, str]:
    """The kernel's name of every socket of this process, by descriptor; empty without /proc."""
    names: dict[int, str] = {}
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return names
    for number in numbers:
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # closed meanwhile
        if name.startswith("socket:"):
            names[int(number)] = name
    return names


def _peer(fd: int) -> End | None:
    return _end(fd, socket.socket.getpeername)


def _listening_address(sock: socket.socket) -> Any:
    """The address at which `sock` listens. Raises `OSError` if it is a connection, even one that has ended."""
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise OSError("it does not listen")
    return sock.getsockname()


def _end(fd: int, which: Callable[[socket.socket], Any]) -> End | None:
    """The address and port of one end of the socket `fd`, which `which` reads from the socket.

    The result is None if `fd` is not an open network socket, or if `which` raises `OSError`, for instance because the
    socket is not connected.
    """
    try:
        copy = os.dup(fd)
    except OSError:
        return None  # closed meanwhile
    try:
        sock = socket.socket(fileno=copy)  # detects the family, on which the form of addresses depends
    except OSError:
        os.close(copy)
        return None
    try:
        end = which(sock)
    except OSError:
        return None
    finally:
        sock.close()
    if not isinstance(end, tuple) or len(end) < 2:
        return None
    # A socket for both IPv6 and IPv4 reports IPv4 addresses in their IPv4-mapped form.
    return end[0].removeprefix(_IPV4_MAPPED), end[1]
