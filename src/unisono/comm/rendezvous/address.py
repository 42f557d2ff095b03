"""Where the peers of one run find each other, written as a URL.

``file:///private/directory``     workers of one host; no port is opened
``tcp://host:port``               worker 0 serves it, on the address of `host` and no other
``tcp://host:port?served=1``      somebody else serves it already (torchrun's agent)
``…?attempt=3``                   the third try of the same job: never meets what an earlier one left; where they are
                                  numbered, what earlier ones left is in nobody's way and may be deleted
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

from torch._C import _distributed_c10d as c10d

from unisono.comm.abort import Abort
from unisono.comm.process_sockets import shut, towards
from unisono.comm.rendezvous.directory_store import DirectoryStore
from unisono.comm.rendezvous.prefix_store import PrefixedStore
from unisono.comm.rendezvous.token_store import TokenStore
from unisono.errors import InvalidInput, PeerLost

_STORE = "store-"
_SHORTEST_PATIENCE_SECONDS, _LONGEST_PATIENCE_SECONDS = 0.1, 1.0
_CURE = "write file:///private/directory or tcp://host:port"


@dataclass(frozen=True)
class RendezvousAddress:
    """A meeting place: a private `directory`, or a `host` and `port`."""

    directory: str = ""
    host: str = ""
    port: int = 0
    attempt: str = "0"
    served: bool = False


def parse_rendezvous(url: str) -> RendezvousAddress:
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
        return RendezvousAddress(directory=parts.path, attempt=attempt)
    if parts.scheme == "tcp" and parts.hostname and port:
        return RendezvousAddress(host=parts.hostname, port=port, attempt=attempt, served=served)
    raise InvalidInput("rendezvous", url, "is not a meeting place", _CURE)


def for_attempt(url: str, attempt: int) -> str:
    """The meeting place `url`, for the time of that number."""
    return f"{url}{'&' if '?' in url else '?'}attempt={attempt}"


def connect_store(
    place: RendezvousAddress, rank: int, timeout_seconds: float, abort: Abort, token: str = ""
) -> c10d.Store:
    """The store of all peers at `place`; over TCP and with a `token`, that of `unisono.comm.rendezvous.token_store`.

    Raises:
        InvalidInput: worker 0 cannot serve at that address, or the directory cannot be made.
        PeerLost: nobody serves there within the deadline, or it was broken off.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if place.directory:
        store = _directory_store(place, timeout_seconds, abort)
    elif token:
        store = TokenStore(place.host, place.port, token, timeout_seconds, abort)
    else:
        store = _tcp_store(place, rank, timeout, abort)
    store.set_timeout(timeout)
    return PrefixedStore(f"attempt/{place.attempt}", store)


def own_address(place: RendezvousAddress) -> str:
    """The address of this host by which the meeting place, and so every peer, is reached."""
    if place.directory:
        return "127.0.0.1"
    family, _, _, _, address = resolve(place)
    # Connecting a datagram socket sends nothing; it only asks the kernel for the route.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _directory_store(place: RendezvousAddress, timeout_seconds: float, abort: Abort) -> c10d.Store:
    directory = Path(place.directory)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return DirectoryStore(directory / (_STORE + quote(place.attempt, safe="")), timeout_seconds, abort)
    except OSError as error:
        raise InvalidInput("rendezvous", place.directory, str(error), "write a directory that is yours") from error


def tidy(place: RendezvousAddress) -> None:
    """All have come to `place`: what numbered attempts before this one left there is not needed any more."""
    if not place.directory or not place.attempt.isdecimal():
        return
    for path in Path(place.directory).glob(f"{_STORE}*"):
        number = path.name.removeprefix(_STORE)
        if number.isdecimal() and int(number) < int(place.attempt):
            shutil.rmtree(path, ignore_errors=True)


def _tcp_store(place: RendezvousAddress, rank: int, timeout: timedelta, abort: Abort) -> c10d.Store:
    if rank == 0 and not place.served:
        wire = listen(place)
        return c10d.TCPStore(place.host, place.port, None, True, timeout, wait_for_workers=False, master_listen_fd=wire)
    end = resolve(place)[4][:2]
    before = towards(end).items()
    # What it waits for there is there no more, once it is broken off.
    abort.add_callback(lambda: shut(dict(towards(end).items() - before)))
    try:
        return abort.run("connect", partial(_reach, place, time.monotonic() + timeout.total_seconds(), abort))
    except RuntimeError as error:
        where = f"{place.host}:{place.port}"
        raise PeerLost([0], "connect", f"nobody serves at {where}: {str(error).splitlines()[0]}") from error


def _reach(place: RendezvousAddress, until: float, abort: Abort) -> c10d.Store:
    """The store that somebody serves at `place`; torch is asked again and again, as it listens to nobody meanwhile."""
    patience_seconds = _SHORTEST_PATIENCE_SECONDS
    while True:
        abort.check("connect")
        # For so long it tries again by itself.
        patience = timedelta(seconds=min(patience_seconds, max(0.01, until - time.monotonic())))
        try:
            return c10d.TCPStore(place.host, place.port, None, False, patience, wait_for_workers=False)
        except RuntimeError:
            if time.monotonic() > until:
                raise
        patience_seconds = min(2 * patience_seconds, _LONGEST_PATIENCE_SECONDS)


def listen(place: RendezvousAddress) -> int:
    """A listening socket on that one address: left to itself, torch's store listens on all of them."""
    family, _, _, _, address = resolve(place)
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


def resolve(place: RendezvousAddress) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]:
    """What the system says first of that host and port. Raises `InvalidInput` where it knows no such host."""
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidInput("rendezvous", place.host, f"is not a host ({error.strerror})", _CURE) from error
    return found[0]  # type: ignore[return-value]
