"""Accepts connections to an actor, after a handshake that proves that the client belongs to the run.

One thread serves all connections that are in the handshake, however many arrive. Their number is limited: the oldest
is closed to make room for a new one. Each may send about a hundred bytes within some seconds.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unisono.comm.actors import handshake
from unisono.comm.actors.handshake import ConnectionTerms, TrustedConnection, Untrusted
from unisono.comm.actors.protection import Protection

LOG = logging.getLogger("unisono")
_MOST_PENDING = 128
_HANDSHAKE_SECONDS = 5.0
_BACKLOG = 256
_NO_DESCRIPTORS_SECONDS = 0.05


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on `address` alone; port 0: any free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind((address, port))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def abstract(name: str) -> str:
    """The address of a Unix socket that has a name, but no file that could remain (Linux's abstract namespace)."""
    return f"\0{name}"


@dataclass(frozen=True)
class ListeningSockets:
    """The listening sockets of an actor: one on a network address, and one under a local name.

    Processes of all hosts can connect to the first, processes of this host and network namespace to the second. A local
    connection has 1.5 times the rate of the loopback device, at half the latency.

    Attributes:
        nearby: the local name; empty if the system has no such sockets.
    """

    sockets: Sequence[socket.socket]
    nearby: str

    @staticmethod
    def open(address: str) -> ListeningSockets:
        over_network = listen(address)
        if sys.platform != "linux":
            return ListeningSockets([over_network], "")
        name = f"unisono-{secrets.token_hex(16)}"
        local = socket.socket(socket.AF_UNIX)
        local.bind(abstract(name))
        local.listen(_BACKLOG)
        return ListeningSockets([over_network, local], name)

    @property
    def endpoint(self) -> tuple[str, int]:
        """Address and port for all hosts."""
        address, port, *_ = self.sockets[0].getsockname()
        return address, port

    def close(self) -> None:
        """Close the sockets."""
        for each in self.sockets:
            each.close()


@dataclass
class _PendingConnection:
    """A connection whose handshake is not complete."""

    sock: socket.socket
    challenge_bytes: bytes
    until: float
    claim_bytes: bytes = b""


class ActorListener:
    """Accepts connections to one actor, in a thread of its own.

    Args:
        listening: sockets that listen; this class closes them.
        token: what a client must know.
        actor: the number of the actor.
        largest_bytes: the largest payload that the actor takes; clients receive this number in the handshake.
        on_connection: called with each trusted connection, whose socket is blocking, and the sender's number.
        encrypted: whether connections over the network are encrypted as well as authenticated.
    """

    def __init__(
        self,
        listening: Sequence[socket.socket],
        token: bytes,
        actor: int,
        largest_bytes: int,
        on_connection: Callable[[TrustedConnection, int], None],
        encrypted: bool = False,
    ) -> None:
        self._listening, self._on_connection = list(listening), on_connection
        self._token, self._actor = token, actor
        over_network = Protection.ENCRYPTED if encrypted else Protection.AUTHENTICATED
        self._nearby, self._distant = (
            ConnectionTerms(largest_bytes, Protection.NONE),
            ConnectionTerms(largest_bytes, over_network),
        )
        self._pending: dict[socket.socket, _PendingConnection] = {}  # the oldest first
        self._rejected = 0
        self._selector = selectors.DefaultSelector()
        for listening_socket in self._listening:
            listening_socket.setblocking(False)
            self._selector.register(listening_socket, selectors.EVENT_READ)
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"listener of actor {actor}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections; trusted connections stay open. May be called twice."""
        if self._wake_write >= 0:
            os.close(self._wake_write)
            self._wake_write = -1
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._poll():
                pass
        finally:
            for pending in list(self._pending.values()):
                self._drop(pending)
            self._selector.close()
            for listening_socket in self._listening:
                listening_socket.close()
            os.close(self._wake_read)

    def _poll(self) -> bool:
        """Wait for an event and process it; False once `close` was called."""
        oldest = next(iter(self._pending.values()), None)
        ready = self._selector.select(None if oldest is None else max(0.0, oldest.until - time.monotonic()))
        for key, _ in ready:
            if key.fileobj == self._wake_read:
                return False
        for key, _ in ready:
            if key.fileobj in self._listening:
                self._accept(key.fileobj)
            elif key.fileobj in self._pending:  # else this connection was closed meanwhile, to make room
                self._receive(self._pending[key.fileobj])
        now = time.monotonic()
        for pending in [each for each in self._pending.values() if each.until <= now]:
            self._reject(pending, "it sent nothing")
        return True

    def _accept(self, listening_socket: socket.socket) -> None:
        try:
            sock, _ = listening_socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # the process has no descriptor left: pending connections occupy some
            for pending in list(self._pending.values()):
                self._reject(pending, "there was no room")
            time.sleep(_NO_DESCRIPTORS_SECONDS)
            return
        sock.setblocking(False)
        if len(self._pending) >= _MOST_PENDING:
            self._reject(next(iter(self._pending.values())), "there was no room")
        pending = _PendingConnection(sock, handshake.challenge(), time.monotonic() + _HANDSHAKE_SECONDS)
        self._pending[sock] = pending
        self._selector.register(sock, selectors.EVENT_READ)
        try:
            sock.send(pending.challenge_bytes)  # never blocks: the buffer of a new socket is empty
        except OSError:
            self._drop(pending)

    def _receive(self, pending: _PendingConnection) -> None:
        try:
            piece = pending.sock.recv(handshake.CLAIM_BYTES - len(pending.claim_bytes))
            pending.claim_bytes += piece
            if len(pending.claim_bytes) == handshake.CLAIM_BYTES:
                terms = self._nearby if pending.sock.family == socket.AF_UNIX else self._distant
                sender, proof = handshake.verify(
                    self._token, pending.challenge_bytes, pending.claim_bytes, self._actor, terms
                )
                self._admit(pending, sender, proof, terms)
            elif not piece:
                self._reject(pending, "it sent too little")
        except BlockingIOError:
            pass
        except Untrusted as reason:
            self._reject(pending, str(reason))
        except OSError as error:
            self._reject(pending, str(error))

    def _admit(self, pending: _PendingConnection, sender: int, proof: bytes, terms: ConnectionTerms) -> None:
        self._forget(pending)
        pending.sock.setblocking(True)
        try:
            pending.sock.send(proof)
        except OSError:
            pending.sock.close()
            return
        self._on_connection(
            handshake.accepted(pending.sock, self._token, pending.challenge_bytes + pending.claim_bytes, terms), sender
        )

    def _reject(self, pending: _PendingConnection, reason: str) -> None:
        self._rejected += 1
        if self._rejected & (self._rejected - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: strangers cannot fill a log
            LOG.warning("actor %d rejected %d connections, the last because %s", self._actor, self._rejected, reason)
        self._drop(pending)

    def _drop(self, pending: _PendingConnection) -> None:
        self._forget(pending)
        pending.sock.close()

    def _forget(self, pending: _PendingConnection) -> None:
        if self._pending.pop(pending.sock, None) is not None:
            self._selector.unregister(pending.sock)
