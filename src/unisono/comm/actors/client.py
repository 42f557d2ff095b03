"""The client's end of a connection to an actor over a socket.

Small calls that are waited for need no thread: `wait` itself reads the socket, and of several waiting threads one
reads for all. For large calls, polled calls and `send`, a thread of the connection reads, so that answers arrive
while the caller computes.
"""

from __future__ import annotations

import copy
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from unisono.comm.abort import Abort
from unisono.comm.actor import ActorMessage
from unisono.comm.actors import handshake, wire_format
from unisono.comm.actors.handshake import TrustedConnection, Untrusted
from unisono.comm.actors.listener import abstract
from unisono.comm.actors.message_stream import Arrival, Inbox, Outbox
from unisono.comm.actors.wire_format import BrokenMessage, Buffer
from unisono.comm.host import host_name
from unisono.errors import PeerLost

LOG = logging.getLogger("unisono")
_RETRY_SECONDS = 0.02
_START_SECONDS = 60.0  # a process has to import torch first; one that has exited refuses connections at once
Count = Callable[[int], None]
Run = Callable[[Callable[[], None]], None]


def not_counted(nbytes: int) -> None:
    """Ignore the bytes of a message."""


def directly(then: Callable[[], None]) -> None:
    """Call ``then()``."""
    then()


@dataclass(frozen=True)
class ActorAddress:
    """Where an actor listens.

    Attributes:
        number, name: the actor's number in its service, and its name for messages.
        rank: the worker that hosts or has started the actor.
        address, port: where the actor listens on the network.
        pid, host: the number of the actor's process, and the name of that process's host.
        nearby: the name of the actor's local socket, for processes of the same host; empty if there is no such socket.
    """

    number: int
    name: str
    rank: int
    address: str
    port: int
    pid: int
    nearby: str = ""
    host: str = ""


class Call:
    """The `Work` of a `SocketConnection`."""

    __slots__ = ("_buffer", "_connection", "_error", "_message", "kind", "number", "over", "then")

    def __init__(
        self, connection: SocketConnection, number: int, kind: str, then: Callable[[ActorMessage | None], None] | None
    ) -> None:
        self._connection, self.number, self.kind, self.then = connection, number, kind, then
        self.over = False
        self._message: ActorMessage | None = None
        self._buffer: Buffer | None = None
        self._error: PeerLost | None = None

    def poll(self) -> bool:
        if not self.over:
            self._connection.read_in_background()
            os.sched_yield()  # a caller that polls in a loop must not keep the reading thread from running
        return self.over

    def wait(self) -> ActorMessage:
        if not self.over:
            self._connection.wait_for(self)
        if self._error is not None:
            raise copy.copy(self._error)
        if self._buffer is not None:
            self._connection.keep(self._buffer)
            self._buffer = None
        assert self._message is not None
        return self._message

    def settle(self, arrival: Arrival) -> None:
        self._message, self._buffer = arrival.message, arrival.buffer
        self.over = True

    def fail(self, detail: str, ranks: Sequence[int]) -> None:
        self._error = PeerLost(ranks, self.kind, detail)
        self.over = True


class SocketConnection:
    """The `ActorConnection` over a connected, trusted socket.

    Args:
        trusted: the connection after its handshake. Its socket is blocking, with the deadline as the kernel's timeouts.
        actor: the actor at the other end.
        count: called with the number of bytes of each message that is sent.
        run: called with each callback of `send`; it calls the callback, while it holds the sending actor's lock if need
            be.
    """

    def __init__(self, trusted: TrustedConnection, actor: ActorAddress, count: Count, run: Run) -> None:
        self.pid = actor.pid
        self._sock, self._actor, self._count, self._run = trusted.sock, actor, count, run
        self._inbox = Inbox(trusted.sock, trusted.terms.largest_bytes, trusted.incoming)
        self._outbox = Outbox(trusted.sock, f"connection to {actor.name}", trusted.outgoing)
        self._lock = threading.Lock()
        self._arrived, self._work_to_do = threading.Condition(self._lock), threading.Condition(self._lock)
        self._pending: dict[int, Call] = {}
        self._started = 0
        self._reading = self._in_background = self._closed = False
        self._failure, self._missing = "", [actor.rank]
        self._valid: Buffer | None = None
        self._thread: threading.Thread | None = None

    def call(self, message: ActorMessage) -> Call:
        return self._start(message, None)

    def send(self, message: ActorMessage, then: Callable[[ActorMessage | None], None]) -> None:
        copied = ActorMessage(message.kind, message.fields, [x.detach().clone() for x in message.tensors])
        self._start(copied, then)

    def close(self) -> None:
        """See `ActorConnection.close`. Calls in flight fail. May be called twice."""
        with self._lock:
            self._closed = True
            self._fail("this end was closed")
            self._work_to_do.notify_all()
        self._outbox.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._sock.close()

    def abort(self, reason: str) -> None:
        """Fail all calls for `reason`, and wake the threads that wait for them. Any thread may call this."""
        with self._lock:
            if not self._failure:
                self._failure, self._missing = reason, []
        self._outbox.shut()

    def _start(self, message: ActorMessage, then: Callable[[ActorMessage | None], None] | None) -> Call:
        with self._lock:
            call = Call(self, self._started, message.kind, then)
            pieces = wire_format.encode(message, call.number)
            self._started += 1
            if self._failure and then is None:
                call.fail(self._failure, self._missing)
                return call
            self._pending[call.number] = call
            if not self._outbox.send(pieces) or then is not None:
                self._begin_reading()
        self._count(wire_format.nbytes(pieces))
        return call

    # What the `Work` needs.

    def wait_for(self, call: Call) -> None:
        """Read, or wait for the thread that reads, until `call` is over."""
        while True:
            with self._lock:
                while self._reading and not call.over:
                    self._arrived.wait()
                if call.over:
                    return
                self._reading = True
            self._read()

    def read_in_background(self) -> None:
        """Have a thread receive the answers to the calls in flight."""
        with self._lock:
            self._begin_reading()

    def keep(self, buffer: Buffer) -> None:
        """The answer in `buffer` is valid from now on, and that of the previous call no longer."""
        previous, self._valid = self._valid, buffer
        if previous is not None:
            self._inbox.buffers.give(previous)

    # Reading. The thread that has set `_reading` reads one message, and no other thread reads meanwhile.

    def _begin_reading(self) -> None:
        self._in_background = True
        if self._thread is None and not self._closed:
            name = f"connection to {self._actor.name} reads"
            self._thread = threading.Thread(target=self._background, name=name, daemon=True)
            self._thread.start()
        self._work_to_do.notify()

    def _background(self) -> None:
        while True:
            with self._lock:
                while not self._closed and (self._reading or not self._pending or not self._in_background):
                    self._work_to_do.wait()
                if self._closed:
                    return
                self._reading = True
            try:
                self._read()
            except Exception:
                LOG.exception("an actor failed while it handled an answer of %s", self._actor.name)
                with self._lock:
                    self._fail("an answer could not be handled")
                self._outbox.close()

    def _read(self) -> None:
        arrival, failure = None, "its reader was interrupted"
        try:
            if not self._failure:
                arrival = self._inbox.read()
        except BlockingIOError:
            failure = "no answer within the deadline"
        except (OSError, BrokenMessage) as error:
            failure = getattr(error, "strerror", None) or str(error)
        finally:
            with self._lock:
                self._reading = False
                call = self._pending.pop(arrival.call, None) if arrival else None
                if call is None:
                    over = self._fail(failure if arrival is None else "it answered a call that was not made")
                else:
                    over = []
                    assert arrival is not None
                    call.settle(arrival)
                self._in_background = self._in_background and bool(self._pending)
                self._arrived.notify_all()
                if self._in_background:
                    self._work_to_do.notify()
        if call is not None and call.then is not None and arrival is not None:
            self._run_callback(call.then, arrival.message)
            self._inbox.buffers.give(arrival.buffer)
        for each in over:
            self._run_callback(each, None)

    def _run_callback(self, then: Callable[[ActorMessage | None], None], message: ActorMessage | None) -> None:
        self._run(lambda: then(message))

    def _fail(self, detail: str) -> list[Callable[[ActorMessage | None], None]]:
        """Fail all calls in flight and all later ones; returns the callbacks that must be called with None."""
        where = f"the connection to {self._actor.name} was lost"
        self._failure = self._failure or f"{where}: {detail}"
        calls, self._pending = list(self._pending.values()), {}
        for call in calls:
            call.fail(self._failure, self._missing)
        self._arrived.notify_all()
        return [call.then for call in calls if call.then is not None]


def connect_actor(
    actor: ActorAddress,
    token: bytes,
    sender: int,
    timeout_seconds: float,
    count: Count = not_counted,
    run: Run = directly,
    abort: Abort | None = None,
) -> SocketConnection:
    """Connect to `actor`, whose process may still be starting.

    Raises:
        PeerLost: the process has exited; or it does not answer within `timeout_seconds`, or 60 s if that is longer; or
            it closes every connection for `timeout_seconds`, as a process does that knows another token; or `abort`
            was set.
    """
    abort, began = abort or Abort(), time.monotonic()
    while True:
        left = began + max(timeout_seconds, _START_SECONDS) - time.monotonic()
        try:
            trusted = abort.run("connect", partial(_authenticated, actor, token, sender, max(left, 0.01), abort))
            _set_socket_options(trusted.sock, timeout_seconds)
            return SocketConnection(trusted, actor, count, run)
        except OSError as error:
            # Refused: the process has exited, as an address is published only once its socket listens.
            # Reset: the process has started. Another attempt succeeds if the process only had too many connections.
            if isinstance(error, ConnectionResetError):
                left = began + timeout_seconds - time.monotonic()
            if isinstance(error, ConnectionRefusedError | Untrusted) or left <= 0:
                raise PeerLost([actor.rank], "connect", f"{actor.name}: {error}") from error
            time.sleep(_RETRY_SECONDS)


def _authenticated(
    actor: ActorAddress, token: bytes, sender: int, timeout_seconds: float, abort: Abort
) -> TrustedConnection:
    """A connection to `actor` after the handshake."""
    sock = _open_socket(actor, timeout_seconds)
    forget = abort.add_callback(partial(_shut, sock))
    try:
        return handshake.authenticate(sock, token, sender, actor.number)
    except BaseException:
        sock.close()
        raise
    finally:
        forget()


def _shut(sock: socket.socket) -> None:
    """Shut `sock` down, which wakes threads that wait for it."""
    with suppress(OSError):  # the connection has ended already
        sock.shutdown(socket.SHUT_RDWR)


def _open_socket(actor: ActorAddress, timeout_seconds: float) -> socket.socket:
    """Connect to `actor`: by its local socket name on the actor's own host, else over TCP.

    Any process may bind a local name, so it counts only if a process of this user listens there.
    """
    if actor.nearby and actor.host == host_name():
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout_seconds)
        try:
            sock.connect(abstract(actor.nearby))
            if _user(sock) == os.getuid():
                return sock
        except OSError:  # the actor is in another network namespace
            pass
        sock.close()
    return socket.create_connection((actor.address, actor.port), timeout=timeout_seconds)


def _user(sock: socket.socket) -> int:
    """The user id of the process that listens at the other end of a local connection (SO_PEERCRED)."""
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


def _set_socket_options(sock: socket.socket, timeout_seconds: float) -> None:
    """Leave timeouts to the kernel, so that one blocking system call transfers a whole message."""
    sock.settimeout(None)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    timeout = struct.pack("@ll", int(timeout_seconds), int(timeout_seconds % 1 * 1e6) + 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, timeout)
