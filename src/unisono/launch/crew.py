"""All workers of a run, from the order to the end: what they say, how they end, and who is ended for it.

    RUNNING ── a consequence is heard ──► DOUBTING ──┐ (its cause is heard, or not in time)
       └────── a failure, a signal ──────────────────┴─► ENDING ── time over, second signal ──► KILLED

ENDING begins with SIGTERM to all, KILLED with SIGKILL; every state may end by the workers having ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from unisono.errors import WorkerFailed
from unisono.launch import failure, process
from unisono.launch.failure import Failure
from unisono.launch.forkserver import Forkserver
from unisono.launch.signals import Inbox
from unisono.launch.stopping import Interrupted
from unisono.launch.tail import Tail
from unisono.launch.worker import Order

_CAUSE_SECONDS = 2.0  # how long a cause is waited for after its consequence was heard
_END_SECONDS = 3.0  # between SIGTERM and SIGKILL to the others after a failure
_KILLED_SECONDS = 10.0  # until a kill must have been reported
_LARGEST_LINE = 1 << 26  # bytes of one report
_PIECE = 1 << 16  # bytes

OnMessage = Callable[[int, Mapping[str, Any]], None]


class _Phase(Enum):
    RUNNING = "running"
    DOUBTING = "doubting"
    ENDING = "ending"
    KILLED = "killed"


@dataclass
class _Member:
    rank: int
    channel: socket.socket
    pid: int | None = None
    heard: bytearray = field(default_factory=bytearray)
    returned: bool = False
    result: Any = None
    silent: bool = False
    failed: bool = False
    ended: bool = False


class Crew:
    """The workers of one run; `run` once.

    Args:
        server: forks them.
        inbox: the signals to this process.
        tail: of a log to be shown meanwhile.
        on_message: called with the rank and what a worker reported.
        stop_seconds: see `launch`.
    """

    def __init__(
        self,
        server: Forkserver,
        inbox: Inbox,
        tail: Tail | None,
        on_message: OnMessage,
        stop_seconds: float,
    ) -> None:
        self._server, self._inbox = server, inbox
        self._on_message, self._stop_seconds = on_message, stop_seconds
        self._sources = selectors.DefaultSelector()
        self._sources.register(server, selectors.EVENT_READ, self._hear_server)
        self._sources.register(inbox, selectors.EVENT_READ, self._obey)
        if tail:
            self._sources.register(tail, selectors.EVENT_READ, tail.copy)
        self._members: list[_Member] = []
        self._failures: list[Failure] = []
        self._signal: int | None = None
        self._phase, self._deadline_seconds = _Phase.RUNNING, float("inf")

    def run(self, orders: Sequence[Order], payload: int) -> list[Any]:
        """Have `orders` carried out and return the results by rank; raises as `launch` does.

        Args:
            orders: one for each worker.
            payload: descriptor of their pickled arguments.
        """
        try:
            while not self._server.ready:
                self._listen()
            for order in orders:
                self._start(order, payload)
            while not all(member.ended for member in self._members):
                self._listen()
        finally:
            for member in self._members:
                self._hang_up(member)
            self._sources.close()
        return self._outcome()

    def _start(self, order: Order, payload: int) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        member = _Member(order.rank, ours)
        self._members.append(member)
        self._sources.register(ours, selectors.EVENT_READ, partial(self._hear, member))
        with theirs:
            self._server.fork(order, [theirs.fileno(), payload])

    def _listen(self) -> None:
        """Wait for the next events, or the deadline, and act on them."""
        left = self._deadline_seconds - time.monotonic()
        for key, _ in self._sources.select(None if left == float("inf") else max(0.0, left)):
            key.data()
        if time.monotonic() >= self._deadline_seconds:
            self._escalate()

    def _hear(self, member: _Member) -> None:
        if member.silent:
            return
        piece = member.channel.recv(_PIECE)
        if not piece:
            self._hang_up(member)
        member.heard += piece
        *lines, rest = member.heard.split(b"\n")
        if len(rest) > _LARGEST_LINE:
            raise WorkerFailed(member.rank, f"reported more than {_LARGEST_LINE} bytes at once")
        member.heard = rest
        for line in lines:
            self._note(member, **json.loads(line))

    def _hang_up(self, member: _Member) -> None:
        if not member.silent:
            member.silent = True
            self._sources.unregister(member.channel)
            member.channel.close()

    def _note(self, member: _Member, **news: Any) -> None:
        if "message" in news:
            self._on_message(member.rank, news["message"])
        elif "result" in news:
            member.returned, member.result = True, news["result"]
        else:
            member.failed = True
            self._fail(Failure(member.rank, **news["failure"]))

    def _hear_server(self) -> None:
        news = self._server.receive()
        if news is None:
            self._bury_all(*self._server.autopsy())
        elif "pid" in news:
            member = self._members[news["rank"]]
            member.pid = news["pid"]
            self._tell(member)
        elif "status" in news:
            self._bury(self._members[news["rank"]], news["status"])

    def _bury(self, member: _Member, status: int) -> None:
        """`member` has ended; hear its last words first."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while not member.silent:
                self._hear(member)
        self._hang_up(member)
        member.ended = True
        ended_by_us = self._phase in (_Phase.ENDING, _Phase.KILLED) and -status in (
            signal.SIGTERM,
            signal.SIGKILL,
        )
        if not (member.failed or ended_by_us or (member.returned and status == 0)):
            self._fail(Failure(member.rank, time.monotonic(), failure.describe(status)))

    def _bury_all(self, status: int, said: str) -> None:
        """The server has ended, and by that all workers."""
        reason = f"lost with the forkserver, which was {failure.describe(status)}"
        left = [member for member in self._members if not member.ended]
        if not left:
            raise WorkerFailed(0, reason, said)
        for member in left:
            member.ended = True
        self._fail(Failure(left[0].rank, time.monotonic(), reason, said))

    def _fail(self, what: Failure) -> None:
        self._failures.append(what)
        if self._phase is _Phase.RUNNING and what.consequence:
            self._enter(_Phase.DOUBTING, _CAUSE_SECONDS)
        elif self._phase in (_Phase.RUNNING, _Phase.DOUBTING) and not what.consequence:
            self._enter(_Phase.ENDING, _END_SECONDS)

    def _obey(self) -> None:
        for number in self._inbox.take():
            if not self._members:
                raise Interrupted(number)
            if self._phase in (_Phase.RUNNING, _Phase.DOUBTING):
                self._signal = number
                self._enter(_Phase.ENDING, self._stop_seconds)
            else:
                self._enter(_Phase.KILLED, _KILLED_SECONDS)

    def _escalate(self) -> None:
        if self._phase is _Phase.DOUBTING:
            self._enter(_Phase.ENDING, _END_SECONDS)
        elif self._phase is _Phase.ENDING:
            self._enter(_Phase.KILLED, _KILLED_SECONDS)
        else:
            rank = next(member.rank for member in self._members if not member.ended)
            raise WorkerFailed(rank, f"still there {_KILLED_SECONDS} s after SIGKILL")

    def _enter(self, phase: _Phase, seconds: float) -> None:
        self._phase, self._deadline_seconds = phase, time.monotonic() + seconds
        for member in self._members:
            self._tell(member)

    def _tell(self, member: _Member) -> None:
        """Let `member` know of the phase; said again to one whose process appears only now."""
        if member.pid is None or member.ended:
            return
        if self._phase is _Phase.ENDING:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGTERM)
        elif self._phase is _Phase.KILLED:
            process.kill_group(member.pid)

    def _outcome(self) -> list[Any]:
        cause = failure.first_cause(self._failures).error() if self._failures else None
        results = [member.result for member in self._members]
        if self._signal is not None:
            complete = all(member.returned for member in self._members)
            raise Interrupted(self._signal, results if complete else ()) from cause
        if cause:
            raise cause
        return results
