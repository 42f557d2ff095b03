"""Serves an actor: passes it one message at a time, from all its connections."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial

from unisono.comm.actor import Actor, ActorConnection, ActorMessage
from unisono.comm.actors import wire_format
from unisono.comm.actors.handshake import TrustedConnection
from unisono.comm.actors.message_stream import READY, Arrival, Inbox, Outbox
from unisono.comm.actors.wire_format import BrokenMessage

LOG = logging.getLogger("unisono")


class ActorServer:
    """Serves an actor over sockets, with a thread per connection, of which one at a time uses the actor.

    ``count(sender, nbytes)`` is called with the size of each answer to `sender`.
    """

    def __init__(self, actor: Actor, number: int, count: Callable[[int, int], None]) -> None:
        self.number, self.count = number, count
        self.largest_bytes = largest_bytes_of(actor)
        self._actor = actor
        self._actor_lock = threading.Lock()
        self._ready = threading.Event()
        self._connections: dict[int, _Connection] = {}
        self._broken = 0
        self._lock = threading.Lock()

    def connected(self, peers: Sequence[ActorConnection]) -> None:
        """Pass the actor the connections to its peers; from now on it receives messages."""
        with self._actor_lock:
            self._actor.connected(peers)
        self._ready.set()

    def run(self, step: Callable[[Actor], None]) -> None:
        """Call ``step(actor)`` while no other thread uses the actor."""
        with self._actor_lock:
            step(self._actor)

    def call_back(self, then: Callable[[], None]) -> None:
        """Call ``then()`` while no other thread uses the actor."""
        self.run(lambda actor: then())

    def accept(self, trusted: TrustedConnection, sender: int) -> None:
        """Serve a connection of `sender`; it is closed at once if `sender` already has one."""
        with self._lock:
            if sender in self._connections:
                trusted.sock.close()
                return
            self._connections[sender] = _Connection(self, trusted, sender)
        self._connections[sender].start()

    def disconnected(self, sender: int) -> None:
        """Remove the connection of `sender`, which may connect again once the actor knows that it was lost."""
        self._ready.wait()
        try:
            self.run(lambda actor: actor.lost(sender))
        except Exception:
            LOG.exception("actor %d failed when it lost %s", self.number, sender_name(sender))
        with self._lock:
            del self._connections[sender]

    def log_broken(self, sender: int, error: BrokenMessage) -> None:
        """Log the 1st, 2nd, 4th, 8th ... broken message, so that a client cannot fill the log."""
        with self._lock:
            self._broken += 1
            is_logged = self._broken & (self._broken - 1) == 0
        if is_logged:
            LOG.warning("actor %d has had %d broken messages, the last of %s: %s", self.number, self._broken,
                        sender_name(sender), error)  # fmt: skip

    def wait_until_ready(self) -> None:
        """Return when the actor is connected with its peers."""
        self._ready.wait()

    def close(self) -> None:
        """End all connections."""
        self._ready.set()
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.close()


def largest_bytes_of(actor: Actor) -> int:
    """The largest payload that `actor` takes: its attribute `largest_bytes`, or 1 GiB."""
    return int(getattr(actor, "largest_bytes", wire_format.LARGEST_BYTES))


def sender_name(sender: int) -> str:
    """The sender's name for messages."""
    return f"worker {sender}" if sender >= 0 else f"actor {-1 - sender}"


class _Connection:
    """The connection of one sender; its thread ends with it."""

    def __init__(self, server: ActorServer, trusted: TrustedConnection, sender: int) -> None:
        self._server, self._sock, self._sender = server, trusted.sock, sender
        _set_socket_options(self._sock)
        name = f"actor {server.number} for {sender_name(sender)}"
        self._inbox = Inbox(self._sock, server.largest_bytes, trusted.incoming)
        self._outbox = Outbox(self._sock, name, trusted.outgoing)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._outbox.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._server.wait_until_ready()
            while True:
                arrival = self._inbox.read()
                if arrival.message.kind == READY:
                    self._outbox.send(wire_format.encode(ActorMessage(READY), arrival.call))
                    continue
                # An earlier answer may be memory of the actor, into which the actor may write from here on.
                self._outbox.drained()
                self._server.run(partial(self._deliver, arrival))
        except BrokenMessage as error:
            self._server.log_broken(self._sender, error)
        except OSError:
            pass  # the connection has ended, or was closed
        except Exception:
            LOG.exception("actor %d failed at a message of %s", self._server.number, sender_name(self._sender))
        finally:
            # Before the socket is closed: a client that notices this may connect again at once.
            self._server.disconnected(self._sender)
            self._outbox.close()
            self._sock.close()

    def _deliver(self, arrival: Arrival, actor: Actor) -> None:
        answered = False

        def answer(message: ActorMessage) -> None:
            nonlocal answered
            if answered:
                raise RuntimeError(f"actor {self._server.number} answered a message {arrival.message.kind!r} twice")
            answered = True
            pieces = wire_format.encode(message, arrival.call)
            self._server.count(self._sender, wire_format.nbytes(pieces))
            self._outbox.send(pieces, lambda: self._inbox.buffers.give(arrival.buffer))

        actor.receive(self._sender, arrival.message, answer)


def _set_socket_options(sock: socket.socket) -> None:
    """Send without delay, and end connections whose other host has vanished."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
