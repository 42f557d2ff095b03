"""The client's end of a conversation with an actor behind a socket.

Nothing needs a thread as long as calls are small and waited for: `wait` itself reads the socket. Where several
threads wait, one reads for all. Where a call is large, or is polled, or was told rather than called, a thread
of the line reads, so that answers arrive while their caller computes.
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
from unisono.comm.actors import handshake as trust
from unisono.comm.actors import wire_format as frames
from unisono.comm.actors.handshake import TrustedConnection, Untrusted
from unisono.comm.actors.listener import abstract
from unisono.comm.actors.message_stream import Arrival, Inbox, Outbox
from unisono.comm.actors.wire_format import BrokenMessage, Buffer
from unisono.comm.host import host_name
from unisono.errors import PeerLost

LOG = logging.getLogger("unisono")
_RETRY_SECONDS = 0.02
_START_SECONDS = 60.0  # a process has to import torch first; one that has died is noticed at once
Count = Callable[[int], None]
Run = Callable[[Callable[[], None]], None]


def not_counted(nbytes: int) -> None:
    """What need not be counted."""


def directly(then: Callable[[], None]) -> None:
    """Call ``then()``."""
    then()


@dataclass(frozen=True)
class ActorAddress:
    """Where an actor is to be found: `rank` is the worker that keeps it, `pid` its process on `host`, `nearby` the name
    under which those on the same host reach it without the network, if there is one."""

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

    __slots__ = ("_buffer", "_error", "_line", "_message", "kind", "number", "over", "then")

    def __init__(
        self, line: SocketConnection, number: int, kind: str, then: Callable[[ActorMessage | None], None] | None
    ) -> None:
        self._line, self.number, self.kind, self.then = line, number, kind, then
        self.over = False
        self._message: ActorMessage | None = None
        self._buffer: Buffer | None = None
        self._error: PeerLost | None = None

    def poll(self) -> bool:
        if not self.over:
            self._line.read_in_background()
            os.sched_yield()  # who polls again and again must not keep the reading thread from running
        return self.over

    def wait(self) -> ActorMessage:
        if not self.over:
            self._line.wait_for(self)
        if self._error is not None:
            raise copy.copy(self._error)
        if self._buffer is not None:
            self._line.keep(self._buffer)
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
        trusted: the connection, blocking, with the deadline as its timeouts in the kernel.
        place: what is at the other end.
        count: called with the bytes of each message that leaves.
        run: how a callback of `send` is to be called, for instance with the actor's attention.
    """

    def __init__(self, trusted: TrustedConnection, place: ActorAddress, count: Count, run: Run) -> None:
        self.pid = place.pid
        self._wire, self._place, self._count, self._run = trusted.wire, place, count, run
        self._inbox = Inbox(trusted.wire, trusted.terms.largest_bytes, trusted.incoming)
        self._outbox = Outbox(trusted.wire, f"line to {place.name}", trusted.outgoing)
        self._lock = threading.Lock()
        self._arrived, self._work_to_do = threading.Condition(self._lock), threading.Condition(self._lock)
        self._pending: dict[int, Call] = {}
        self._started = 0
        self._reading = self._in_background = self._closed = False
        self._failure, self._missing = "", [place.rank]
        self._kept: Buffer | None = None
        self._thread: threading.Thread | None = None

    def call(self, message: ActorMessage) -> Call:
        return self._start(message, None)

    def send(self, message: ActorMessage, then: Callable[[ActorMessage | None], None]) -> None:
        copied = ActorMessage(message.kind, message.fields, [x.detach().clone() for x in message.tensors])
        self._start(copied, then)

    def close(self) -> None:
        """As the contract; calls under way fail. May be called twice."""
        with self._lock:
            self._closed = True
            self._fail("this end was closed")
            self._work_to_do.notify_all()
        self._outbox.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._wire.close()

    def break_off(self, why: str) -> None:
        """Nothing more comes, for the reason `why`; whoever waits is woken. From any thread; waits for nothing."""
        with self._lock:
            if not self._failure:
                self._failure, self._missing = why, []
        self._outbox.shut()

    def _start(self, message: ActorMessage, then: Callable[[ActorMessage | None], None] | None) -> Call:
        with self._lock:
            call = Call(self, self._started, message.kind, then)
            pieces = frames.encode(message, call.number)
            self._started += 1
            if self._failure and then is None:
                call.fail(self._failure, self._missing)
                return call
            self._pending[call.number] = call
            if not self._outbox.send(pieces) or then is not None:
                self._begin_reading()
        self._count(frames.nbytes(pieces))
        return call

    # What the `Work` needs.

    def wait_for(self, call: Call) -> None:
        """Read, or have it read, until `call` is over."""
        while True:
            with self._lock:
                while self._reading and not call.over:
                    self._arrived.wait()
                if call.over:
                    return
                self._reading = True
            self._read()

    def read_in_background(self) -> None:
        """What is under way is to arrive although nobody waits."""
        with self._lock:
            self._begin_reading()

    def keep(self, buffer: Buffer) -> None:
        """The answer in `buffer` is valid from now on, that of the call before no more."""
        kept, self._kept = self._kept, buffer
        if kept is not None:
            self._inbox.buffers.give(kept)

    # Reading. Who sets `_reading` reads one message, and nobody else does meanwhile.

    def _begin_reading(self) -> None:
        self._in_background = True
        if self._thread is None and not self._closed:
            name = f"line to {self._place.name} reads"
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
                LOG.exception("an actor failed at an answer of %s", self._place.name)
                with self._lock:
                    self._fail("an answer could not be handled")
                self._outbox.close()

    def _read(self) -> None:
        arrival, failure = None, "its reader was interrupted"
        try:
            if not self._failure:
                arrival = self._inbox.read()
        except BlockingIOError:
            failure = "silent beyond the deadline"
        except (OSError, BrokenMessage) as error:
            failure = getattr(error, "strerror", None) or str(error)
        finally:
            with self._lock:
                self._reading = False
                call = self._pending.pop(arrival.call, None) if arrival else None
                if call is None:
                    over = self._fail(failure if arrival is None else "it answered what nobody asked")
                else:
                    over = []
                    assert arrival is not None
                    call.settle(arrival)
                self._in_background = self._in_background and bool(self._pending)
                self._arrived.notify_all()
                if self._in_background:
                    self._work_to_do.notify()
        if call is not None and call.then is not None and arrival is not None:
            self._say(call.then, arrival.message)
            self._inbox.buffers.give(arrival.buffer)
        for each in over:
            self._say(each, None)

    def _say(self, then: Callable[[ActorMessage | None], None], message: ActorMessage | None) -> None:
        self._run(lambda: then(message))

    def _fail(self, detail: str) -> list[Callable[[ActorMessage | None], None]]:
        """All that is under way has failed, and all that comes; returns who has to be told so."""
        where = f"the connection to {self._place.name} was lost"
        self._failure = self._failure or f"{where}: {detail}"
        calls, self._pending = list(self._pending.values()), {}
        for call in calls:
            call.fail(self._failure, self._missing)
        self._arrived.notify_all()
        return [call.then for call in calls if call.then is not None]


def connect_actor(
    place: ActorAddress,
    token: bytes,
    sender: int,
    timeout_seconds: float,
    count: Count = not_counted,
    run: Run = directly,
    abort: Abort | None = None,
) -> SocketConnection:
    """A line to the actor at `place`, which answers when it is ready.

    Raises:
        PeerLost: nobody is there, or nobody who knows the token, within the deadline (and the time that a
            process may take to start); or it was broken off.
    """
    abort, until = abort or Abort(), time.monotonic() + max(timeout_seconds, _START_SECONDS)
    while True:
        left = until - time.monotonic()
        try:
            trusted = abort.run("connect", partial(_introduced, place, token, sender, max(left, 0.01), abort))
            _set_options(trusted.wire, timeout_seconds)
            return SocketConnection(trusted, place, count, run)
        except OSError as error:
            # Nobody listens any more: a place is told only after somebody does.
            if isinstance(error, ConnectionRefusedError | Untrusted) or left <= 0:
                raise PeerLost([place.rank], "connect", f"{place.name}: {error}") from error
            time.sleep(_RETRY_SECONDS)


def _introduced(
    place: ActorAddress, token: bytes, sender: int, timeout_seconds: float, abort: Abort
) -> TrustedConnection:
    """A connection to `place` that is trusted at both ends."""
    wire = _reach(place, timeout_seconds)
    forget = abort.add_callback(partial(_shut, wire))
    try:
        return trust.introduce(wire, token, sender, place.number)
    except BaseException:
        wire.close()
        raise
    finally:
        forget()


def _shut(wire: socket.socket) -> None:
    """Whoever waits for something from `wire` is woken."""
    with suppress(OSError):  # it has ended already
        wire.shutdown(socket.SHUT_RDWR)


def _reach(place: ActorAddress, timeout_seconds: float) -> socket.socket:
    """A connection to `place`: by its local socket name on the actor's own host, else over TCP. Any process may bind a
    local name, so the name counts only where a process of this user listens."""
    if place.nearby and place.host == host_name():
        wire = socket.socket(socket.AF_UNIX)
        wire.settimeout(timeout_seconds)
        try:
            wire.connect(abstract(place.nearby))
            if _user(wire) == os.getuid():
                return wire
        except OSError:  # it is in another network namespace
            pass
        wire.close()
    return socket.create_connection((place.address, place.port), timeout=timeout_seconds)


def _user(wire: socket.socket) -> int:
    """The user id of the process that listens at the other end of a local connection (SO_PEERCRED)."""
    _, user, _ = struct.unpack("3i", wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


def _set_options(wire: socket.socket, timeout_seconds: float) -> None:
    """Block in the kernel, which alone keeps the time: that is what makes one system call carry a whole message."""
    wire.settimeout(None)
    if wire.family != socket.AF_UNIX:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    timeout = struct.pack("@ll", int(timeout_seconds), int(timeout_seconds % 1 * 1e6) + 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        wire.setsockopt(socket.SOL_SOCKET, option, timeout)
