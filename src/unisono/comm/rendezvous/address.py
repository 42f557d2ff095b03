"""The address of a rendezvous, written as a URL.

``file:///private/directory``     workers of one host; no port is opened
``tcp://host:port``               worker 0 serves it, on the address of `host` and no other
``tcp://host:port?served=1``      another process serves it already (torchrun's agent)
``…?attempt=3``                   the third attempt of the same job: it sees no keys of other attempts; what attempts
                                  with smaller numbers wrote may be deleted
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

from torch._C import _distributed_c10d as c10d

from unisono.comm.abort import Abort
from unisono.comm.process_sockets import connections_to, shut_down
from unisono.comm.rendezvous.directory_store import DirectoryStore
from unisono.comm.rendezvous.prefix_store import PrefixedStore
from unisono.comm.rendezvous.token_store import TokenStore
from unisono.errors import InvalidInput, PeerLost

_STORE = "store-"
_SILENT_SECONDS = 1.0  # after the deadline of the attempts, which torch heeds unless the other side is silent
_SHORTEST_ATTEMPT_SECONDS, _LONGEST_ATTEMPT_SECONDS = 0.1, 1.0
_CURE = "write file:///private/directory or tcp://host:port"


@dataclass(frozen=True)
class RendezvousAddress:
    """Where a rendezvous takes place: in a private `directory`, or at a `host` and `port`."""

    directory: str = ""
    host: str = ""
    port: int = 0
    attempt: str = "0"
    served: bool = False


def parse_rendezvous(url: str) -> RendezvousAddress:
    """The address that `url` stands for. Raises `InvalidInput` if `url` is not the URL of a rendezvous."""
    try:
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        port = parts.port
    except ValueError as error:
        raise InvalidInput("rendezvous", url, str(error), _CURE) from error
    if unknown := set(query) - {"attempt", "served"}:
        raise InvalidInput("rendezvous", url, f"has unknown parameters ({', '.join(sorted(unknown))})", _CURE)
    attempt, served = query.get("attempt", "0"), query.get("served", "0") == "1"
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return RendezvousAddress(directory=parts.path, attempt=attempt)
    if parts.scheme == "tcp" and parts.hostname and port:
        return RendezvousAddress(host=parts.hostname, port=port, attempt=attempt, served=served)
    raise InvalidInput("rendezvous", url, "is not the URL of a rendezvous", _CURE)


def for_attempt(url: str, attempt: int) -> str:
    """`url` with the number of an attempt; the keys of different attempts are separate."""
    return f"{url}{'&' if '?' in url else '?'}attempt={attempt}"


def connect_store(
    address: RendezvousAddress, rank: int, timeout_seconds: float, abort: Abort, token: str = ""
) -> c10d.Store:
    """Connect to the store at `address`; over TCP and with a `token`, it is a `TokenStore`.

    Raises:
        InvalidInput: worker 0 cannot serve at that address, or the directory cannot be created.
        PeerLost: no process serves the store within the deadline, or `abort` was set.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if address.directory:
        store = _directory_store(address, timeout_seconds, abort)
    elif token:
        store = TokenStore(address.host, address.port, token, timeout_seconds, abort)
    else:
        store = _tcp_store(address, rank, timeout, abort)
    store.set_timeout(timeout)
    return PrefixedStore(f"attempt/{address.attempt}", store)


def own_address(address: RendezvousAddress) -> str:
    """The address of this host on the route to the rendezvous, by which its peers can reach it."""
    if address.directory:
        return "127.0.0.1"
    family, _, _, _, sockaddr = resolve(address)
    # Connecting a datagram socket sends nothing; it only asks the kernel for the route.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(sockaddr)
        return str(probe.getsockname()[0])


def _directory_store(address: RendezvousAddress, timeout_seconds: float, abort: Abort) -> c10d.Store:
    directory = Path(address.directory)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return DirectoryStore(directory / (_STORE + quote(address.attempt, safe="")), timeout_seconds, abort)
    except OSError as error:
        raise InvalidInput("rendezvous", address.directory, str(error), "write a directory that is yours") from error


def delete_earlier_attempts(address: RendezvousAddress) -> None:
    """Delete the stores of earlier numbered attempts, once all workers of this one are connected."""
    if not address.directory or not address.attempt.isdecimal():
        return
    for path in Path(address.directory).glob(f"{_STORE}*"):
        number = path.name.removeprefix(_STORE)
        if number.isdecimal() and int(number) < int(address.attempt):
            shutil.rmtree(path, ignore_errors=True)


def _tcp_store(address: RendezvousAddress, rank: int, timeout: timedelta, abort: Abort) -> c10d.Store:
    if rank == 0 and not address.served:
        return c10d.TCPStore(
            address.host, address.port, None, True, timeout, wait_for_workers=False, master_listen_fd=listen(address)
        )
    end = resolve(address)[4][:2]
    before = connections_to(end).items()

    def give_up() -> None:
        # torch would go on waiting in a connection that was opened here.
        shut_down(dict(connections_to(end).items() - before))

    abort.add_callback(give_up)
    seconds = timeout.total_seconds()
    silent = threading.Timer(seconds + _SILENT_SECONDS, give_up)
    silent.daemon = True
    silent.start()
    try:
        return abort.run("connect", partial(_connect_tcp, address, time.monotonic() + seconds, abort))
    except RuntimeError as error:
        cause = str(error).splitlines()[0]
        if silent.finished.is_set():
            cause = "another program accepts connections there, and answers nothing; choose another port"
        raise PeerLost([0], "connect", f"no store is served at {address.host}:{address.port}: {cause}") from error
    finally:
        silent.cancel()


def _connect_tcp(address: RendezvousAddress, deadline: float, abort: Abort) -> c10d.Store:
    """Connect to the store that another process serves, in short attempts, as torch cannot be aborted within one."""
    attempt_seconds = _SHORTEST_ATTEMPT_SECONDS
    while True:
        abort.check("connect")
        # torch itself retries until this timeout.
        attempt_timeout = timedelta(seconds=min(attempt_seconds, max(0.01, deadline - time.monotonic())))
        try:
            return c10d.TCPStore(address.host, address.port, None, False, attempt_timeout, wait_for_workers=False)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
        attempt_seconds = min(2 * attempt_seconds, _LONGEST_ATTEMPT_SECONDS)


def listen(address: RendezvousAddress) -> int:
    """The descriptor of a socket that listens on one address; torch's store would listen on all addresses itself."""
    family, _, _, _, sockaddr = resolve(address)
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(sockaddr)
        server.listen(1024)
    except OSError as error:
        server.close()
        where = f"tcp://{address.host}:{address.port}"
        raise InvalidInput(
            "rendezvous", where, f"worker 0 cannot serve there ({os.strerror(error.errno or 0)})",
            "write an address of worker 0's host and a free port",
        ) from error  # fmt: skip
    return server.detach()


def resolve(address: RendezvousAddress) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]:
    """The first result of ``getaddrinfo`` for host and port. Raises `InvalidInput` if there is no such host."""
    try:
        results = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidInput("rendezvous", address.host, f"is not a host ({error.strerror})", _CURE) from error
    return results[0]  # type: ignore[return-value]
