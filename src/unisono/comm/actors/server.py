"""Where an actor sits: one message at a time gets through to it, from whichever connection."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial

from unisono.comm.actor import Actor, ActorConnection, ActorMessage
from unisono.comm.actors import wire_format as frames
from unisono.comm.actors.handshake import TrustedConnection
from unisono.comm.actors.message_stream import READY, Arrival, Inbox, Outbox
from unisono.comm.actors.wire_format import BrokenMessage

LOG = logging.getLogger("unisono")


class ActorServer:
    """An actor behind sockets: a thread per connection, of which one at a time has the actor's attention.

    ``count(sender, nbytes)`` is called with each answer.
    """

    def __init__(self, actor: Actor, number: int, count: Callable[[int, int], None]) -> None:
        self.number, self.count = number, count
        self.largest_bytes = largest_bytes_of(actor)
        self._actor = actor
        self._attention = threading.Lock()
        self._open = threading.Event()
        self._connections: dict[int, _Connection] = {}
        self._broken = 0
        self._lock = threading.Lock()

    def connected(self, lines: Sequence[ActorConnection]) -> None:
        """Introduce the actor to its colleagues; from now on it receives."""
        with self._attention:
            self._actor.connected(lines)
        self._open.set()

    def run(self, step: Callable[[Actor], None]) -> None:
        """``step(actor)``, while nothing else reaches the actor."""
        with self._attention:
            step(self._actor)

    def call_back(self, then: Callable[[], None]) -> None:
        """``then()``, while nothing else reaches the actor."""
        self.run(lambda actor: then())

    def welcome(self, trusted: TrustedConnection, sender: int) -> None:
        """A connection of `sender`, of whom there can be one."""
        with self._lock:
            if sender in self._connections:
                trusted.wire.close()
                return
            self._connections[sender] = _Connection(self, trusted, sender)
        self._connections[sender].start()

    def leave(self, sender: int) -> None:
        """The connection of `sender` has ended; from now on it may come again, to an actor that knows of the end."""
        self._open.wait()
        try:
            self.run(lambda actor: actor.lost(sender))
        except Exception:
            LOG.exception("actor %d failed when it lost %s", self.number, name_of(sender))
        with self._lock:
            del self._connections[sender]

    def note_broken(self, sender: int, error: BrokenMessage) -> None:
        """Say so of the 1st, 2nd, 4th, 8th ... broken message: nobody can fill a log."""
        with self._lock:
            self._broken += 1
            told = self._broken & (self._broken - 1) == 0
        if told:
            LOG.warning("actor %d has had %d broken messages, the last of %s: %s", self.number, self._broken,
                        name_of(sender), error)  # fmt: skip

    def wait_until_open(self) -> None:
        """Returns when the actor has met its colleagues."""
        self._open.wait()

    def close(self) -> None:
        """End all connections."""
        self._open.set()
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.close()


def largest_bytes_of(actor: Actor) -> int:
    """The largest payload that `actor` takes: its attribute `largest_bytes`, or 1 GiB."""
    return int(getattr(actor, "largest_bytes", frames.LARGEST_BYTES))


def name_of(sender: int) -> str:
    """Who that is, for people."""
    return f"worker {sender}" if sender >= 0 else f"actor {-1 - sender}"


class _Connection:
    """What one sender says and is answered; its thread ends with it."""

    def __init__(self, desk: ActorServer, trusted: TrustedConnection, sender: int) -> None:
        self._desk, self._wire, self._sender = desk, trusted.wire, sender
        _set_options(self._wire)
        name = f"actor {desk.number} for {name_of(sender)}"
        self._inbox = Inbox(self._wire, desk.largest_bytes, trusted.incoming)
        self._outbox = Outbox(self._wire, name, trusted.outgoing)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._outbox.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._desk.wait_until_open()
            while True:
                arrival = self._inbox.read()
                if arrival.message.kind == READY:
                    self._outbox.send(frames.encode(ActorMessage(READY), arrival.call))
                    continue
                # An earlier answer may be memory of the actor, which it may write into from here on.
                self._outbox.drained()
                self._desk.run(partial(self._hand_in, arrival))
        except BrokenMessage as error:
            self._desk.note_broken(self._sender, error)
        except OSError:
            pass  # it has gone, or was closed
        except Exception:
            LOG.exception("actor %d failed at a message of %s", self._desk.number, name_of(self._sender))
        finally:
            self._desk.leave(self._sender)  # first: who sees the end may be back at once
            self._outbox.close()
            self._wire.close()

    def _hand_in(self, arrival: Arrival, actor: Actor) -> None:
        answered = False

        def answer(message: ActorMessage) -> None:
            nonlocal answered
            if answered:
                raise RuntimeError(f"actor {self._desk.number} answered a {arrival.message.kind!r} twice")
            answered = True
            pieces = frames.encode(message, arrival.call)
            self._desk.count(self._sender, frames.nbytes(pieces))
            self._outbox.send(pieces, lambda: self._inbox.buffers.give(arrival.buffer))

        actor.receive(self._sender, arrival.message, answer)


def _set_options(wire: socket.socket) -> None:
    """No waiting for more to send, and an end to connections whose other host has vanished."""
    if wire.family == socket.AF_UNIX:
        return
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
