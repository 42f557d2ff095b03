"""Where connections to an actor arrive; who cannot prove to belong to the run gets no further.

One thread looks after all that are not yet known, however many come: they are few at a time (who came first
goes first when there is no room), may send a hundred bytes, and have some seconds.
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

from unisono.comm.actors import handshake as trust
from unisono.comm.actors.handshake import ConnectionTerms, TrustedConnection, Untrusted
from unisono.comm.actors.protection import Protection

LOG = logging.getLogger("unisono")
_ROOM = 128
_PATIENCE_SECONDS = 5.0
_BACKLOG = 256
_NO_DESCRIPTORS_SECONDS = 0.05


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on that one address; port 0: any."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    wire = socket.socket(family, socket.SOCK_STREAM)
    try:
        wire.bind((address, port))
        wire.listen(_BACKLOG)
    except OSError:
        wire.close()
        raise
    return wire


def abstract(name: str) -> str:
    """The address of a Linux socket that has a name but no file, so that nothing is left behind."""
    return f"\0{name}"


@dataclass(frozen=True)
class ListeningSockets:
    """Where an actor listens: on one address for all hosts, and under a name for processes of this host (and
    network namespace). A connection by name carries half as much again as the loopback device, at half the latency.

    Attributes:
        nearby: that name; "" where the system has no such sockets.
    """

    sockets: Sequence[socket.socket]
    nearby: str

    @staticmethod
    def open(address: str) -> ListeningSockets:
        network = listen(address)
        if sys.platform != "linux":
            return ListeningSockets([network], "")
        name = f"unisono-{secrets.token_hex(16)}"
        local = socket.socket(socket.AF_UNIX)
        local.bind(abstract(name))
        local.listen(_BACKLOG)
        return ListeningSockets([network, local], name)

    @property
    def endpoint(self) -> tuple[str, int]:
        """Address and port for all hosts."""
        address, port, *_ = self.sockets[0].getsockname()
        return address, port

    def close(self) -> None:
        """Nobody listens any more."""
        for each in self.sockets:
            each.close()


@dataclass
class _Visitor:
    wire: socket.socket
    challenged: bytes
    until: float
    said: bytes = b""


class ActorListener:
    """Accepts connections in a thread of its own.

    Args:
        doors: sockets that listen; they belong to the reception.
        token: what a client must know.
        actor: the number of the actor that answers here.
        largest_bytes: the largest payload that the actor takes, to be told to clients.
        welcome: called with each connection that is trusted (blocking by now) and the number of who is there.
        encrypted: whether what comes over the network is encrypted as well as authenticated.
    """

    def __init__(
        self,
        doors: Sequence[socket.socket],
        token: bytes,
        actor: int,
        largest_bytes: int,
        welcome: Callable[[TrustedConnection, int], None],
        encrypted: bool = False,
    ) -> None:
        self._doors, self._welcome = list(doors), welcome
        self._token, self._actor = token, actor
        over_network = Protection.ENCRYPTED if encrypted else Protection.AUTHENTICATED
        self._nearby, self._distant = (
            ConnectionTerms(largest_bytes, Protection.NONE),
            ConnectionTerms(largest_bytes, over_network),
        )
        self._visitors: dict[socket.socket, _Visitor] = {}  # in the order in which they came
        self._turned_away = 0
        self._selector = selectors.DefaultSelector()
        for door in self._doors:
            door.setblocking(False)
            self._selector.register(door, selectors.EVENT_READ)
        self._bell, self._cord = os.pipe()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"reception of actor {actor}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody comes in any more; who is in stays. May be called twice."""
        if self._cord >= 0:
            os.close(self._cord)
            self._cord = -1
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._look():
                pass
        finally:
            for visitor in list(self._visitors.values()):
                self._dismiss(visitor)
            self._selector.close()
            for door in self._doors:
                door.close()
            os.close(self._bell)

    def _look(self) -> bool:
        """Wait for something to happen, and see to it; False when the bell has rung."""
        oldest = next(iter(self._visitors.values()), None)
        ready = self._selector.select(None if oldest is None else max(0.0, oldest.until - time.monotonic()))
        for key, _ in ready:
            if key.fileobj == self._bell:
                return False
        for key, _ in ready:
            if key.fileobj in self._doors:
                self._accept(key.fileobj)
            elif key.fileobj in self._visitors:  # else it had to make room
                self._hear(self._visitors[key.fileobj])
        now = time.monotonic()
        for visitor in [each for each in self._visitors.values() if each.until <= now]:
            self._turn_away(visitor, "it said nothing")
        return True

    def _accept(self, door: socket.socket) -> None:
        try:
            wire, _ = door.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no descriptors: those whom we let wait have them
            for visitor in list(self._visitors.values()):
                self._turn_away(visitor, "there was no room")
            time.sleep(_NO_DESCRIPTORS_SECONDS)
            return
        wire.setblocking(False)
        if len(self._visitors) >= _ROOM:
            self._turn_away(next(iter(self._visitors.values())), "there was no room")
        visitor = _Visitor(wire, trust.challenge(), time.monotonic() + _PATIENCE_SECONDS)
        self._visitors[wire] = visitor
        self._selector.register(wire, selectors.EVENT_READ)
        try:
            wire.send(visitor.challenged)  # a new socket has room for it
        except OSError:
            self._dismiss(visitor)

    def _hear(self, visitor: _Visitor) -> None:
        try:
            piece = visitor.wire.recv(trust.CLAIM_BYTES - len(visitor.said))
            visitor.said += piece
            if len(visitor.said) == trust.CLAIM_BYTES:
                terms = self._nearby if visitor.wire.family == socket.AF_UNIX else self._distant
                sender, proof = trust.judge(self._token, visitor.challenged, visitor.said, self._actor, terms)
                self._let_in(visitor, sender, proof, terms)
            elif not piece:
                self._turn_away(visitor, "it said too little")
        except BlockingIOError:
            pass
        except Untrusted as reason:
            self._turn_away(visitor, str(reason))
        except OSError as error:
            self._turn_away(visitor, str(error))

    def _let_in(self, visitor: _Visitor, sender: int, proof: bytes, terms: ConnectionTerms) -> None:
        self._forget(visitor)
        visitor.wire.setblocking(True)
        try:
            visitor.wire.send(proof)
        except OSError:
            visitor.wire.close()
            return
        self._welcome(trust.admitted(visitor.wire, self._token, visitor.challenged + visitor.said, terms), sender)

    def _turn_away(self, visitor: _Visitor, reason: str) -> None:
        self._turned_away += 1
        if self._turned_away & (self._turned_away - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: nobody can fill a log
            LOG.warning("actor %d turned away %d connections, the last as %s", self._actor, self._turned_away, reason)
        self._dismiss(visitor)

    def _dismiss(self, visitor: _Visitor) -> None:
        self._forget(visitor)
        visitor.wire.close()

    def _forget(self, visitor: _Visitor) -> None:
        if self._visitors.pop(visitor.wire, None) is not None:
            self._selector.unregister(visitor.wire)
