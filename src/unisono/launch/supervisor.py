"""All workers of a run, from the order to the end: what they say, how they end, and who is ended for it.

    RUNNING ── a consequence is heard ──► DOUBTING ──┐ (its cause is heard, or not in time)
       ├────── a failure, a signal ──────────────────┴─► ENDING ── time over, second signal ──┐
       └────── the run is over without the others ─────► PARTING ── time over, a signal ──────┴─► KILLED

ENDING begins with a request to all to stop, KILLED with SIGKILL; every state may end by the workers having ended. A
terminal that closes sends several SIGHUP, so that a second one is no second request. What the end of a worker means
while RUNNING, its `succession.Succession` decides.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, Protocol

from unisono.errors import InvalidInput, RunFailed, WorkerFailed
from unisono.launch import failure, process
from unisono.launch.failure import Failure
from unisono.launch.forkserver import Forkserver
from unisono.launch.restart_policy import NoRestart, RestartPolicy, RestartVerdict
from unisono.launch.signals import SignalInbox
from unisono.launch.stop_request import STOP, Interrupted
from unisono.launch.worker_handle import WorkerHandle
from unisono.launch.worker_main import WorkerSpec

_CAUSE_SECONDS = 2.0  # how long a cause is waited for after its consequence was heard
_END_SECONDS = 3.0  # between a request to stop and SIGKILL to the others after a failure
_PART_SECONDS = 10.0  # how long those who are still there may take when the run is over
_AGAIN_SECONDS = 0.5  # after which a signal is a second one: timeout(1) and others send theirs twice at once
_KILLED_SECONDS = 10.0  # until a kill must have been reported

OnMessage = Callable[[int, Mapping[str, Any]], None]


class _SupervisorPhase(Enum):
    RUNNING = "running"
    DOUBTING = "doubting"
    ENDING = "ending"
    PARTING = "parting"
    KILLED = "killed"


class EventSource(Protocol):
    """Something besides workers that the launcher has to look after."""

    def fileno(self) -> int:
        """Readable when `attend` has something to do."""

    def attend(self) -> None:
        """Do it."""


class WorkerSupervisor:
    """The workers of one run; `run` once.

    Args:
        server: forks them.
        inbox: the signals to this process.
        beside: looked after meanwhile.
        on_message: called with the rank and what a worker reported.
        stop_seconds: see `launch`.
        succession: decides what the end of a worker means.
        terminal: descriptors for the worker whose order has a `terminal`.
    """

    def __init__(
        self,
        server: Forkserver,
        inbox: SignalInbox,
        beside: Iterable[EventSource],
        on_message: OnMessage,
        stop_seconds: float,
        succession: RestartPolicy | None = None,
        terminal: Sequence[int] = (),
    ) -> None:
        self._server, self._inbox, self._terminal = server, inbox, terminal
        self._on_message, self._stop_seconds = on_message, stop_seconds
        self._succession: RestartPolicy = succession or NoRestart()
        self._sources = selectors.DefaultSelector()
        self._sources.register(server, selectors.EVENT_READ, self._hear_server)
        self._sources.register(inbox, selectors.EVENT_READ, self._obey)
        for source in beside:
            self._sources.register(source, selectors.EVENT_READ, source.attend)
        self._members: list[WorkerHandle] = []  # the latest in each place
        self._awaited: dict[int, float] = {}  # when another one is started there
        self._failures: list[Failure] = []
        self._signal: int | None = None
        self._asked_seconds = float("-inf")
        self._phase, self._deadline_seconds = _SupervisorPhase.RUNNING, float("inf")
        self._parted = False
        self._furthest = 0  # step that is done

    def run(self, orders: Sequence[WorkerSpec], payload: int) -> list[Any]:
        """Have `orders` carried out and return the results by rank; raises as `launch` does.

        Args:
            orders: one for each worker.
            payload: descriptor of their pickled arguments.
        """
        try:
            while not self._server.ready:
                self._listen()
            self._payload = payload
            for order in orders:
                self._members.append(self._start(order))
            while self._awaited or not all(member.ended for member in self._members):
                self._listen()
        finally:
            for member in self._members:
                self._hang_up(member)
            self._sources.close()
        return self._outcome()

    def _start(self, order: WorkerSpec) -> WorkerHandle:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        member = WorkerHandle(replace(order, worker=self._succession.name(order.rank)), ours)
        self._sources.register(ours, selectors.EVENT_READ, partial(self._hear, member))
        with theirs:
            terminal = self._terminal if order.terminal else ()
            self._server.fork(member.order, [theirs.fileno(), self._payload, *terminal])
        return member

    def _listen(self) -> None:
        """Wait for the next events, or what is due first, and act on them."""
        due = min(self._deadline_seconds, *self._awaited.values(), float("inf"))
        left = due - time.monotonic()
        for key, _ in self._sources.select(None if left == float("inf") else max(0.0, left)):
            key.data()
        if time.monotonic() >= self._deadline_seconds:
            self._escalate()
        for place in [place for place, at in self._awaited.items() if time.monotonic() >= at]:
            del self._awaited[place]
            self._members[place] = self._start(self._members[place].order)

    def _hear(self, member: WorkerHandle) -> None:
        if member.silent:
            return
        said = member.hear()
        if said is None:
            self._hang_up(member)
        for news in said or ():
            self._note(member, **news)

    def _hang_up(self, member: WorkerHandle) -> None:
        if not member.silent:
            member.silent = True
            self._sources.unregister(member.channel)
            member.channel.close()

    def _note(self, member: WorkerHandle, **news: Any) -> None:
        if "message" in news:
            if news["message"].get("kind") == "progress":
                self._furthest = max(self._furthest, news["message"]["step"])
            if news["message"].get("kind") == "ended":
                member.ending = news["message"]["text"]
            verdict = self._succession.heard(news["message"])
            self._on_message(member.rank, news["message"])
            if self._phase is _SupervisorPhase.RUNNING:
                self._carry_out(member, verdict)
            if news["message"].get("kind") == "breakpoint":
                member.channel.send(b".")  # it waits until whoever shows messages has let go of the terminal
        elif "result" in news:
            member.returned, member.result = True, news["result"]
            if self._over and self._phase in (_SupervisorPhase.RUNNING, _SupervisorPhase.DOUBTING):
                self._parted = True  # whatever becomes of the others
                self._enter(_SupervisorPhase.PARTING, _PART_SECONDS)
        else:
            member.failed = True
            what = Failure(member.rank, **news["failure"])
            if what.unlike and self._phase is _SupervisorPhase.RUNNING:
                others = sum(not other.ended for other in self._members if other is not member)
                lived = what.at_seconds - member.began_seconds
                self._carry_out(member, self._succession.lost(what, others, lived))
            else:
                self._fail(what)

    def _hear_server(self) -> None:
        for news in self._server.receive():
            if "pid" in news:
                member = self._members[news["rank"]]
                member.pid = news["pid"]
                self._succession.began(member.rank, member.pid)
                self._tell(member)
            elif "status" in news:
                self._bury(self._members[news["rank"]], news["status"])
            elif "words" in news:
                self._on_message(0, {"kind": "notice", "text": news["words"]})
            elif "ended" in news:
                status, said = self._server.autopsy()
                raise WorkerFailed(0, f"lost with the forkserver, which was {failure.describe(status)}", said)

    def _bury(self, member: WorkerHandle, status: int) -> None:
        """`member` has ended; hear its last words first."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while not member.silent:
                self._hear(member)
        self._hang_up(member)
        member.ended = True
        self._succession.ended(member.rank)
        ended_by_us = self._phase in (_SupervisorPhase.ENDING, _SupervisorPhase.KILLED) and -status in (
            self._succession.stop,
            signal.SIGKILL,
        )
        if not (member.failed or ended_by_us):
            self._judge(member, status)

    def _judge(self, member: WorkerHandle, status: int) -> None:
        """What follows from the end of `member`."""
        what = Failure(member.rank, time.monotonic(), failure.describe(status))
        if self._phase is _SupervisorPhase.RUNNING:
            others = sum(not other.ended for other in self._members)
            if member.returned and status == 0:
                verdict = self._succession.returned(member.rank, member.result, others)
            else:
                verdict = self._succession.lost(what, others, what.at_seconds - member.began_seconds)
            self._carry_out(member, verdict)
        elif not (member.returned and status == 0):
            self._fail(what)

    def _carry_out(self, member: WorkerHandle, verdict: RestartVerdict) -> None:
        if verdict.words:
            self._on_message(member.rank, {"kind": "notice", "text": verdict.words})
        if verdict.cause is not None:
            self._fail(verdict.cause)
        elif verdict.another_in_seconds == 0:
            self._members[member.rank] = self._start(member.order)
        elif verdict.another_in_seconds is not None:
            self._awaited[member.rank] = time.monotonic() + verdict.another_in_seconds

    def _fail(self, what: Failure) -> None:
        self._failures.append(what)
        if self._phase is _SupervisorPhase.RUNNING and what.consequence:
            self._enter(_SupervisorPhase.DOUBTING, _CAUSE_SECONDS)
        elif self._phase in (_SupervisorPhase.RUNNING, _SupervisorPhase.DOUBTING) and not what.consequence:
            self._enter(_SupervisorPhase.ENDING, _END_SECONDS)

    def _obey(self) -> None:
        for number in self._inbox.take():
            if not self._members:
                raise Interrupted(number)
            if self._phase in (_SupervisorPhase.RUNNING, _SupervisorPhase.DOUBTING):
                self._signal, self._asked_seconds = number, time.monotonic()
                self._enter(_SupervisorPhase.ENDING, self._stop_seconds)
            elif number != signal.SIGHUP and time.monotonic() - self._asked_seconds > _AGAIN_SECONDS:
                self._enter(_SupervisorPhase.KILLED, _KILLED_SECONDS)

    def _escalate(self) -> None:
        if self._phase is _SupervisorPhase.DOUBTING:
            self._enter(_SupervisorPhase.ENDING, _END_SECONDS)
        elif self._phase in (_SupervisorPhase.ENDING, _SupervisorPhase.PARTING):
            self._enter(_SupervisorPhase.KILLED, _KILLED_SECONDS)
        else:
            rank = next(member.rank for member in self._members if not member.ended)
            raise WorkerFailed(rank, f"still there {_KILLED_SECONDS} s after SIGKILL")

    def _enter(self, phase: _SupervisorPhase, seconds: float) -> None:
        self._phase, self._deadline_seconds = phase, time.monotonic() + seconds
        self._awaited.clear()
        for member in self._members:
            self._tell(member)

    def _tell(self, member: WorkerHandle) -> None:
        """Let `member` know of the phase; said again to one whose process appears only now."""
        if member.pid is None or member.ended:
            return
        if self._phase is _SupervisorPhase.ENDING:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, self._succession.stop)
        elif self._phase is _SupervisorPhase.KILLED:
            process.kill_group(member.pid)

    @property
    def _over(self) -> bool:
        return self._succession.over([member.result for member in self._members])

    def _outcome(self) -> list[Any]:
        endings = {member.rank: member.ending for member in self._members if member.ending}
        cause = failure.first_cause(self._failures, endings).error() if self._failures else None
        if isinstance(cause, InvalidInput) and self._furthest:  # of a worker that came later
            cause = RunFailed(f"after {self._furthest} step{'s' * (self._furthest != 1)}: {cause}")
        results = [member.result for member in self._members]
        if self._signal is not None:
            complete = self._over or all(member.returned for member in self._members)
            raise Interrupted(self._signal, results if complete else ()) from cause
        if cause and not self._parted:
            raise cause
        if lacking := self._succession.lacking(results):
            raise Interrupted(STOP, words=lacking)
        return results
