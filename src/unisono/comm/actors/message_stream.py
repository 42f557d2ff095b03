"""Messages over a connected socket: blocking calls of the kernel on memory that is there already.

One system call carries a whole payload, so a thread that sends or receives does not hold up those that
compute. Small messages leave in the thread that sends them, large ones in a thread of their own.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from unisono.comm.actor import ActorMessage
from unisono.comm.actors import wire_format as frames
from unisono.comm.actors.protection import Direction
from unisono.comm.actors.wire_format import BrokenMessage, Buffer, Head

READY = "\0ready"
"""The kind of a message that is answered, without the actor, as soon as the actor receives."""
_SCRATCH_BYTES = 1 << 16
_SMALL_BYTES = 1 << 16
_KEPT_BUFFERS = 2
# Who sleeps is woken late, and finds cold caches: the same lines of Python then take 3 to 5 times as long. So a
# reader stays awake where messages follow each other closely; where they do not, it costs little to have tried.
_LOOK_OUT_SECONDS = 200e-6
_SLEEPS = 15  # reads without looking out after one that has been in vain
_MOST_PIECES = 512  # the kernel takes 1024


class Buffers:
    """Memory for payloads, used again and again; `largest_bytes` bounds what is in use at one time."""

    def __init__(self, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes
        self._used_bytes = 0
        self._free: list[Buffer] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Buffer:
        """A buffer of `nbytes` or more. Raises `BrokenMessage` where that is too much."""
        with self._lock:
            if self._used_bytes + nbytes > self._largest_bytes:
                raise BrokenMessage(f"{self._used_bytes} + {nbytes} bytes await answers; {self._largest_bytes} may")
            buffer = self._fitting(nbytes)
            self._used_bytes += buffer.nbytes
            return buffer

    def give(self, buffer: Buffer) -> None:
        """`buffer` may be written again."""
        with self._lock:
            self._used_bytes -= buffer.nbytes
            if buffer.nbytes:
                self._free.append(buffer)
                self._free.sort(key=attrgetter("nbytes"))
                del self._free[:-_KEPT_BUFFERS]

    def _fitting(self, nbytes: int) -> Buffer:
        if nbytes:
            for place, buffer in enumerate(self._free):
                if nbytes <= buffer.nbytes <= self._largest_bytes - self._used_bytes:
                    return self._free.pop(place)
            del self._free[-1:]
        return Buffer(nbytes)


class Arrival(NamedTuple):
    """A message, the number of its call, and the buffer in which its tensors lie."""

    call: int
    message: ActorMessage
    buffer: Buffer


class Inbox:
    """Reads messages from a blocking socket; one thread at a time.

    Small reads go through a scratch buffer, so that a small message costs one system call.

    Args:
        incoming: opens what arrives.
    """

    def __init__(self, wire: socket.socket, largest_bytes: int, incoming: Direction) -> None:
        self.buffers = Buffers(largest_bytes)
        self._wire, self._largest_bytes, self._incoming = wire, largest_bytes, incoming
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = self._end = 0
        self._asleep = 0

    def read(self) -> Arrival:
        """The next message; its tensors are valid until its buffer is given back.

        Raises:
            BrokenMessage: what came is not one; nothing after it can be read.
            OSError: the connection is gone (`BlockingIOError`: silent for as long as the socket allows).
        """
        said = bytes(self._exactly(frames.HEAD_BYTES))
        head = Head.parse(said, self._largest_bytes)
        nbytes = head.table_bytes + head.text_bytes
        single = head.payload_bytes if head.payload_bytes <= self._incoming.single_bytes else 0
        rest = self._incoming.open(self._exactly(nbytes + single + self._incoming.tag_bytes), said)
        table = frames.parse_table(head, rest[: head.table_bytes])
        kind, fields = frames.parse_text(bytes(rest[head.table_bytes : nbytes]))
        buffer = self.buffers.take(head.payload_bytes)
        if single:
            buffer.bytes[:single] = rest[nbytes:]
        for start in range(single, head.payload_bytes, self._incoming.segment_bytes):
            # A tag lies where the next segment begins, which is written after it was looked at.
            end = min(start + self._incoming.segment_bytes, head.payload_bytes) + self._incoming.tag_bytes
            self._into(buffer.bytes[start:end])
            self._incoming.open(buffer.bytes[start:end])
        return Arrival(head.call, ActorMessage(kind, fields, buffer.cut(table)), buffer)

    def _exactly(self, nbytes: int) -> memoryview:
        """The next `nbytes`, valid until the next read."""
        if nbytes > _SCRATCH_BYTES:
            whole = memoryview(bytearray(nbytes))
            self._into(whole)
            return whole
        if self._start + nbytes > _SCRATCH_BYTES:
            left = self._end - self._start
            self._scratch[:left] = bytes(self._scratch[self._start : self._end])
            self._start, self._end = 0, left
        while self._end - self._start < nbytes:
            self._end += self._receive_promptly(self._scratch[self._end :])
        found = self._scratch[self._start : self._start + nbytes]
        self._start += nbytes
        if self._start == self._end:
            self._start = self._end = 0
        return found

    def _into(self, target: memoryview) -> None:
        known = min(self._end - self._start, len(target))
        target[:known] = self._scratch[self._start : self._start + known]
        self._start += known
        while known < len(target):
            known += self._receive(target[known:], socket.MSG_WAITALL)

    def _receive_promptly(self, target: memoryview) -> int:
        """Look out for a moment before sleeping, as long as that has been worth it."""
        if self._asleep:
            self._asleep -= 1
            return self._receive(target, 0)
        until = time.perf_counter() + _LOOK_OUT_SECONDS
        while time.perf_counter() < until:
            try:
                return self._receive(target, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
        self._asleep = _SLEEPS
        return self._receive(target, 0)

    def _receive(self, target: memoryview, flags: int) -> int:
        count = self._wire.recv_into(target, 0, flags)
        if not count:
            raise ConnectionResetError("the other end has closed the connection")
        return count


@dataclass(slots=True)
class _Leaving:
    parts: Iterator[list[memoryview]]
    sent: Callable[[], None]


class Outbox:
    """Sends messages over a blocking socket, in the order in which they come, from any thread.

    An error while sending is no news: whoever reads from the same socket sees that it has ended.

    Args:
        outgoing: protects what leaves.
    """

    def __init__(self, wire: socket.socket, name: str, outgoing: Direction) -> None:
        self._wire, self._name, self._outgoing = wire, name, outgoing
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[_Leaving] = deque()
        self._thread: threading.Thread | None = None
        self._over = False

    def send(self, pieces: list[memoryview], sent: Callable[[], None] = lambda: None) -> bool:
        """Never waits. True: it has left; else a thread sends it. ``sent()`` follows when its memory is not
        needed any more."""
        with self._lock:
            parts = None if self._over else self._outgoing.protect(pieces)
            if parts is not None and not self._queue and frames.nbytes(pieces) <= _SMALL_BYTES:
                left = self._send_now([piece for part in parts for piece in part])
                parts = iter([left]) if left else None
            if parts is not None:
                self._queue.append(_Leaving(parts, sent))
                self._hand_over()
                return False
        sent()
        return True

    def drained(self) -> None:
        """Returns when nothing is left to be sent."""
        with self._lock:
            while self._queue and not self._over:
                self._changed.wait()

    def shut(self) -> None:
        """Nothing more is sent; the socket is shut down, which ends whoever reads from it or writes to it."""
        with self._changed:
            self._break()

    def close(self) -> None:
        """As `shut`, and the thread that sends has ended."""
        self.shut()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _break(self) -> None:
        self._over = True
        self._changed.notify_all()
        with suppress(OSError):  # it may be connected no more
            self._wire.shutdown(socket.SHUT_RDWR)

    def _send_now(self, pieces: list[memoryview]) -> list[memoryview]:
        """What is left of `pieces`."""
        try:
            return _without(pieces, self._wire.sendmsg(pieces[:_MOST_PIECES], (), socket.MSG_DONTWAIT))
        except BlockingIOError:
            return pieces
        except OSError:
            self._over = True
            return []

    def _hand_over(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"{self._name} sends", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._over:
                    self._changed.wait()
                if self._over:
                    self._queue.clear()
                    return
                leaving = self._queue[0]
            try:
                for pieces in leaving.parts:
                    while pieces:
                        pieces = _without(pieces, self._wire.sendmsg(pieces[:_MOST_PIECES]))
            except OSError:  # gone, or nothing taken for as long as the socket allows
                with self._changed:
                    self._break()
            leaving.sent()
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()


def _without(pieces: list[memoryview], sent: int) -> list[memoryview]:
    """`pieces` less the first `sent` bytes."""
    for place, piece in enumerate(pieces):
        if sent < piece.nbytes:
            return [piece[sent:], *pieces[place + 1 :]] if sent else pieces[place:]
        sent -= piece.nbytes
    return []
