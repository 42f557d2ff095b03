"""Sends and receives messages over a connected socket, with blocking system calls on memory that is allocated already.

One system call transfers a whole payload, so a thread that sends or receives holds the interpreter's lock for a
moment only. Small messages are sent by the calling thread, large ones by a thread of the outbox.
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
from unisono.comm.actors import wire_format
from unisono.comm.actors.protection import Direction
from unisono.comm.actors.wire_format import BrokenMessage, Buffer, Head

READY = "\0ready"
"""The kind of a message that the server answers, without the actor, as soon as the actor receives messages."""
_SCRATCH_BYTES = 1 << 16
_SMALL_BYTES = 1 << 16
_CACHED_BUFFERS = 2
# A thread that sleeps wakes up late and with cold caches: the same lines of Python then take 3 to 5 times as long. So
# a reader spins while messages follow each other closely; where they do not, the attempts to spin cost little.
_SPIN_SECONDS = 200e-6
_READS_WITHOUT_SPIN = 15  # after one read during whose spinning nothing arrived
_MOST_PIECES = 512  # the kernel takes 1024


class Buffers:
    """A pool of memory for payloads; `largest_bytes` bounds what is in use at one time."""

    def __init__(self, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes
        self._used_bytes = 0
        self._free: list[Buffer] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Buffer:
        """A buffer of `nbytes` or more. Raises `BrokenMessage` beyond the bound."""
        with self._lock:
            if self._used_bytes + nbytes > self._largest_bytes:
                raise BrokenMessage(f"it needs {nbytes} bytes: {self._used_bytes} of {self._largest_bytes} are in use")
            buffer = self._fitting(nbytes)
            self._used_bytes += buffer.nbytes
            return buffer

    def give(self, buffer: Buffer) -> None:
        """Return `buffer` to the pool."""
        with self._lock:
            self._used_bytes -= buffer.nbytes
            if buffer.nbytes:
                self._free.append(buffer)
                self._free.sort(key=attrgetter("nbytes"))
                del self._free[:-_CACHED_BUFFERS]

    def _fitting(self, nbytes: int) -> Buffer:
        if nbytes:
            for index, buffer in enumerate(self._free):
                if nbytes <= buffer.nbytes <= self._largest_bytes - self._used_bytes:
                    return self._free.pop(index)
            del self._free[-1:]
        return Buffer(nbytes)


class Arrival(NamedTuple):
    """A message, the number of its call, and the buffer that holds its tensors."""

    call: int
    message: ActorMessage
    buffer: Buffer


class Inbox:
    """Reads messages from a blocking socket; one thread at a time may use it.

    Small reads go through a scratch buffer, so that a small message costs one system call.

    Args:
        largest_bytes: the largest payload, and the most memory of payloads in use at one time.
        incoming: decrypts or verifies what arrives.
    """

    def __init__(self, sock: socket.socket, largest_bytes: int, incoming: Direction) -> None:
        self.buffers = Buffers(largest_bytes)
        self._sock, self._largest_bytes, self._incoming = sock, largest_bytes, incoming
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = self._end = 0
        self._blocking_reads = 0

    def read(self) -> Arrival:
        """The next message; its tensors are valid until its buffer is returned to `buffers`.

        Raises:
            BrokenMessage: the data is not a message; nothing after it can be read.
            OSError: the connection has ended (`BlockingIOError`: the socket's timeout has passed).
        """
        head_bytes = bytes(self._take(wire_format.HEAD_BYTES))
        head = Head.parse(head_bytes, self._largest_bytes)
        nbytes = head.table_bytes + head.text_bytes
        inline = head.payload_bytes if head.payload_bytes <= self._incoming.single_bytes else 0
        rest = self._incoming.open(self._take(nbytes + inline + self._incoming.tag_bytes), head_bytes)
        table = wire_format.parse_table(head, rest[: head.table_bytes])
        kind, fields = wire_format.parse_text(bytes(rest[head.table_bytes : nbytes]))
        buffer = self.buffers.take(head.payload_bytes)
        if inline:
            buffer.bytes[:inline] = rest[nbytes:]
        for start in range(inline, head.payload_bytes, self._incoming.segment_bytes):
            # A tag occupies the place of the next segment's first bytes, which are received after the tag is verified.
            end = min(start + self._incoming.segment_bytes, head.payload_bytes) + self._incoming.tag_bytes
            self._fill(buffer.bytes[start:end])
            self._incoming.open(buffer.bytes[start:end])
        return Arrival(head.call, ActorMessage(kind, fields, buffer.cut(table)), buffer)

    def _take(self, nbytes: int) -> memoryview:
        """The next `nbytes`, valid until the next read."""
        if nbytes > _SCRATCH_BYTES:
            whole = memoryview(bytearray(nbytes))
            self._fill(whole)
            return whole
        if self._start + nbytes > _SCRATCH_BYTES:
            left = self._end - self._start
            self._scratch[:left] = bytes(self._scratch[self._start : self._end])
            self._start, self._end = 0, left
        while self._end - self._start < nbytes:
            self._end += self._receive_spinning(self._scratch[self._end :])
        taken = self._scratch[self._start : self._start + nbytes]
        self._start += nbytes
        if self._start == self._end:
            self._start = self._end = 0
        return taken

    def _fill(self, target: memoryview) -> None:
        count = min(self._end - self._start, len(target))
        target[:count] = self._scratch[self._start : self._start + count]
        self._start += count
        while count < len(target):
            count += self._receive(target[count:], socket.MSG_WAITALL)

    def _receive_spinning(self, target: memoryview) -> int:
        """Receive into `target`; spin for a moment before sleeping, unless nothing arrived during recent spinning."""
        if self._blocking_reads:
            self._blocking_reads -= 1
            return self._receive(target, 0)
        until = time.perf_counter() + _SPIN_SECONDS
        while time.perf_counter() < until:
            try:
                return self._receive(target, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
        self._blocking_reads = _READS_WITHOUT_SPIN
        return self._receive(target, 0)

    def _receive(self, target: memoryview, flags: int) -> int:
        count = self._sock.recv_into(target, 0, flags)
        if not count:
            raise ConnectionResetError("the other end has closed the connection")
        return count


@dataclass(slots=True)
class _Outgoing:
    """A message that the outbox's thread sends; `sent` is called when its memory is not needed any more."""

    parts: Iterator[list[memoryview]]
    sent: Callable[[], None]


class Outbox:
    """Sends messages over a blocking socket, in the order of the calls, from any thread.

    Errors while sending are not raised: the thread that reads from the same socket sees that the connection has ended.

    Args:
        outgoing: authenticates or encrypts what is sent.
    """

    def __init__(self, sock: socket.socket, name: str, outgoing: Direction) -> None:
        self._sock, self._name, self._outgoing = sock, name, outgoing
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[_Outgoing] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def send(self, pieces: list[memoryview], sent: Callable[[], None] = lambda: None) -> bool:
        """Send a message without blocking; True if all of it was sent at once, else a thread sends the rest.

        ``sent()`` is called when the memory of `pieces` is not needed any more.
        """
        with self._lock:
            parts = None if self._closed else self._outgoing.protect(pieces)
            if parts is not None and not self._queue and wire_format.nbytes(pieces) <= _SMALL_BYTES:
                left = self._send_now([piece for part in parts for piece in part])
                parts = iter([left]) if left else None
            if parts is not None:
                self._queue.append(_Outgoing(parts, sent))
                self._wake_sender()
                return False
        sent()
        return True

    def drained(self) -> None:
        """Return when the queue is empty."""
        with self._lock:
            while self._queue and not self._closed:
                self._changed.wait()

    def shut(self) -> None:
        """Send nothing more, and shut the socket down, which wakes threads that read from the socket or write to it."""
        with self._changed:
            self._shut()

    def close(self) -> None:
        """Call `shut`, and join the thread that sends."""
        self.shut()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _shut(self) -> None:
        self._closed = True
        self._changed.notify_all()
        with suppress(OSError):  # it may have ended already
            self._sock.shutdown(socket.SHUT_RDWR)

    def _send_now(self, pieces: list[memoryview]) -> list[memoryview]:
        """Send without blocking; returns what is left of `pieces`."""
        try:
            return _without(pieces, self._sock.sendmsg(pieces[:_MOST_PIECES], (), socket.MSG_DONTWAIT))
        except BlockingIOError:
            return pieces
        except OSError:
            self._closed = True
            return []

    def _wake_sender(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"{self._name} sends", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    self._queue.clear()
                    return
                outgoing = self._queue[0]
            try:
                for pieces in outgoing.parts:
                    while pieces:
                        pieces = _without(pieces, self._sock.sendmsg(pieces[:_MOST_PIECES]))
            except OSError:  # the connection has ended, or its timeout has passed
                with self._changed:
                    self._shut()
            outgoing.sent()
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()


def _without(pieces: list[memoryview], sent: int) -> list[memoryview]:
    """`pieces` less the first `sent` bytes."""
    for index, piece in enumerate(pieces):
        if sent < piece.nbytes:
            return [piece[sent:], *pieces[index + 1 :]] if sent else pieces[index:]
        sent -= piece.nbytes
    return []
