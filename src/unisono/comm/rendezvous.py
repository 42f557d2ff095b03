"""Where the peers of one run find each other, written as a URL.

``file:///private/directory``     workers of one host; no port is opened
``tcp://host:port``               worker 0 serves it, on the address of `host` and no other
``tcp://host:port?served=1``      somebody else serves it already (torchrun's agent)
``…?attempt=3``                   the third try of the same job: never meets what an earlier one left
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from torch._C import _distributed_c10d as c10d

from unisono.errors import InvalidInput, PeerLost

_CURE = "write file:///private/directory or tcp://host:port"


@dataclass(frozen=True)
class Rendezvous:
    """A meeting place: a private `directory`, or a `host` and `port`."""

    directory: str = ""
    host: str = ""
    port: int = 0
    attempt: str = "0"
    served: bool = False


def parse_rendezvous(url: str) -> Rendezvous:
    """Raises `InvalidInput` where `url` is not a meeting place."""
    try:
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        port = parts.port
    except ValueError as error:
        raise InvalidInput("rendezvous", url, str(error), _CURE) from error
    if unknown := set(query) - {"attempt", "served"}:
        raise InvalidInput("rendezvous", url, f"does not know {', '.join(sorted(unknown))}", _CURE)
    attempt, served = query.get("attempt", "0"), query.get("served", "0") == "1"
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return Rendezvous(directory=parts.path, attempt=attempt)
    if parts.scheme == "tcp" and parts.hostname and port:
        return Rendezvous(host=parts.hostname, port=port, attempt=attempt, served=served)
    raise InvalidInput("rendezvous", url, "is not a meeting place", _CURE)


def open_store(place: Rendezvous, rank: int, deadline_seconds: float) -> c10d.Store:
    """The store of all peers at `place`.

    Raises:
        InvalidInput: worker 0 cannot serve at that address, or the directory cannot be made.
        PeerLost: nobody serves there within the deadline.
    """
    timeout = timedelta(seconds=deadline_seconds)
    store = _file_store(place) if place.directory else _tcp_store(place, rank, timeout)
    store.set_timeout(timeout)
    return c10d.PrefixStore(f"attempt/{place.attempt}", store)


def own_address(place: Rendezvous) -> str:
    """The address of this host by which the meeting place, and so every peer, is reached."""
    if place.directory:
        return "127.0.0.1"
    family, _, _, _, address = _resolve(place)
    # Connecting a datagram socket sends nothing; it only asks the kernel for the route.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _file_store(place: Rendezvous) -> c10d.Store:
    directory = Path(place.directory)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput("rendezvous", place.directory, str(error), "write a directory that is yours") from error
    return c10d.FileStore(str(directory / "store"), -1)


def _tcp_store(place: Rendezvous, rank: int, timeout: timedelta) -> c10d.Store:
    serves = rank == 0 and not place.served
    listening = _listen(place) if serves else None
    try:
        return c10d.TCPStore(
            place.host, place.port, None, serves, timeout, wait_for_workers=False, master_listen_fd=listening
        )
    except RuntimeError as error:
        where = f"{place.host}:{place.port}"
        raise PeerLost([0], "connect", f"nobody serves at {where}: {str(error).splitlines()[0]}") from error


def _listen(place: Rendezvous) -> int:
    """A listening socket on that one address: left to itself, torch's store listens on all of them."""
    family, _, _, _, address = _resolve(place)
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen(1024)
    except OSError as error:
        server.close()
        where = f"tcp://{place.host}:{place.port}"
        raise InvalidInput(
            "rendezvous", where, f"worker 0 cannot serve there ({os.strerror(error.errno or 0)})",
            "write an address of worker 0's host and a free port",
        ) from error  # fmt: skip
    return server.detach()


def _resolve(place: Rendezvous) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidInput("rendezvous", place.host, f"is not a host ({error.strerror})", _CURE) from error
    return found[0]  # type: ignore[return-value]
