"""Supervises the workers of one launcher from their start to their exit.

    RUNNING ── a consequence is reported ─► AWAITING_CAUSE ──┐ (the cause is reported, or time is up)
       ├────── a failure, a signal ──────────────────────────┴─► STOPPING ── time is up, second signal ─┐
       └────── the run is complete, some workers still run ────► FINISHING ── time is up, a signal ─────┴─► KILLING

STOPPING begins with a request to all workers to stop, KILLING with SIGKILL. Every phase may end because all workers
have exited. A terminal that is closed sends several SIGHUP, so a second SIGHUP does not count as a second signal. In
the phase RUNNING, a `RestartPolicy` decides what the exit of a worker means.
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
from unisono.launch.failure import Failure, first_cause
from unisono.launch.forkserver import ForkServer
from unisono.launch.restart_policy import NoRestart, RestartPolicy, RestartVerdict
from unisono.launch.signals import SignalInbox
from unisono.launch.stop_request import STOP, Interrupted
from unisono.launch.worker_handle import WorkerHandle
from unisono.launch.worker_main import WorkerSpec
from unisono.system import process
from unisono.system.exit_status import describe_exit

_CAUSE_SECONDS = 2.0  # how much later than its consequence a cause may be reported
_STOP_SECONDS = 3.0  # from a request to stop until SIGKILL, after a failure
_FINISH_SECONDS = 10.0  # how long workers may run after the run is complete
_SECOND_SIGNAL_SECONDS = 0.5  # signals closer than this count as one: timeout(1) and others send one twice at once
_KILL_SECONDS = 10.0  # from SIGKILL until the exit of the process must have been reported

OnMessage = Callable[[int, Mapping[str, Any]], None]


class _SupervisorPhase(Enum):
    RUNNING = "running"
    AWAITING_CAUSE = "awaiting cause"
    STOPPING = "stopping"
    FINISHING = "finishing"
    KILLING = "killing"


class EventSource(Protocol):
    """A source of events, besides workers, that the launcher's event loop serves."""

    def fileno(self) -> int:
        """Descriptor that is readable when `on_readable` has to be called."""

    def on_readable(self) -> None:
        """Handle the events."""


class WorkerSupervisor:
    """The event loop of a launcher; `run` may be called once.

    Args:
        server: forks the workers.
        inbox: receives signals to this process.
        event_sources: further sources of events, which the same loop serves.
        on_message: called with the rank of a worker and a message that the worker reported.
        stop_seconds: see `LaunchOptions`.
        policy: decides what the exit of a worker means; None: `NoRestart`.
        terminal: descriptors of the terminal, for the worker whose spec has a `terminal`.
    """

    def __init__(
        self,
        server: ForkServer,
        inbox: SignalInbox,
        event_sources: Iterable[EventSource],
        on_message: OnMessage,
        stop_seconds: float,
        policy: RestartPolicy | None = None,
        terminal: Sequence[int] = (),
    ) -> None:
        self._server, self._inbox, self._terminal = server, inbox, terminal
        self._on_message, self._stop_seconds = on_message, stop_seconds
        self._policy: RestartPolicy = policy or NoRestart()
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ, self._receive_from_server)
        self._selector.register(inbox, selectors.EVENT_READ, self._handle_signals)
        for source in event_sources:
            self._selector.register(source, selectors.EVENT_READ, source.on_readable)
        self._workers: list[WorkerHandle] = []  # the latest worker of each slot
        self._restarts: dict[int, float] = {}  # by slot: when its next process is started
        self._failures: list[Failure] = []
        self._signal: int | None = None
        self._signal_seconds = float("-inf")
        self._phase, self._deadline_seconds = _SupervisorPhase.RUNNING, float("inf")
        self._completed = False
        self._last_step = 0

    def run(self, specs: Sequence[WorkerSpec], payload: int) -> list[Any]:
        """Run one worker for each of `specs`, and return their results by rank; raises the errors of `launch`.

        Args:
            payload: descriptor of the pickled arguments.
        """
        try:
            while not self._server.ready:
                self._handle_events()
            self._payload = payload
            for spec in specs:
                self._workers.append(self._start(spec))
            while self._restarts or not all(worker.exited for worker in self._workers):
                self._handle_events()
        finally:
            for worker in self._workers:
                self._disconnect(worker)
            self._selector.close()
        return self._outcome()

    def _start(self, spec: WorkerSpec) -> WorkerHandle:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        worker = WorkerHandle(replace(spec, worker=self._policy.next_name(spec.rank)), ours)
        self._selector.register(ours, selectors.EVENT_READ, partial(self._receive, worker))
        with theirs:
            terminal = self._terminal if spec.terminal else ()
            self._server.fork(worker.spec, [theirs.fileno(), self._payload, *terminal])
        return worker

    def _handle_events(self) -> None:
        """Wait for the next event or deadline, and handle it."""
        deadline = min(self._deadline_seconds, *self._restarts.values(), float("inf"))
        timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        for key, _ in self._selector.select(timeout):
            key.data()
        if time.monotonic() >= self._deadline_seconds:
            self._escalate()
        for slot in [slot for slot, start in self._restarts.items() if time.monotonic() >= start]:
            del self._restarts[slot]
            self._workers[slot] = self._start(self._workers[slot].spec)

    def _receive(self, worker: WorkerHandle) -> None:
        if worker.disconnected:
            return
        received = worker.receive()
        if received is None:
            self._disconnect(worker)
        for report in received or ():
            self._handle_report(worker, **report)

    def _disconnect(self, worker: WorkerHandle) -> None:
        if not worker.disconnected:
            worker.disconnected = True
            self._selector.unregister(worker.channel)
            worker.channel.close()

    def _handle_report(self, worker: WorkerHandle, **report: Any) -> None:
        if "message" in report:
            self._handle_message(worker, report["message"])
        elif "result" in report:
            worker.returned, worker.result = True, report["result"]
            if self._is_complete and self._phase in (_SupervisorPhase.RUNNING, _SupervisorPhase.AWAITING_CAUSE):
                self._completed = True  # whatever the other workers do next
                self._enter(_SupervisorPhase.FINISHING, _FINISH_SECONDS)
        else:
            worker.failed = True
            failure = Failure(worker.rank, **report["failure"])
            if failure.is_mismatch and self._phase is _SupervisorPhase.RUNNING:
                others = sum(not other.exited for other in self._workers if other is not worker)
                lifetime = failure.at_seconds - worker.started_seconds
                self._carry_out(worker, self._policy.worker_failed(failure, others, lifetime))
            else:
                self._add_failure(failure)

    def _handle_message(self, worker: WorkerHandle, message: Mapping[str, Any]) -> None:
        if message.get("kind") == "progress":
            self._last_step = max(self._last_step, message["step"])
        if message.get("kind") == "ended":
            worker.script_exit = message["text"]
        verdict = self._policy.on_message(message)
        self._on_message(worker.rank, message)
        if self._phase is _SupervisorPhase.RUNNING:
            self._carry_out(worker, verdict)
        if message.get("kind") == "breakpoint":
            worker.channel.send(b".")  # `on_message` has released the terminal: the worker may use it

    def _receive_from_server(self) -> None:
        for event in self._server.receive():
            if "pid" in event:
                worker = self._workers[event["rank"]]
                worker.pid = event["pid"]
                self._policy.process_started(worker.rank, worker.pid)
                self._signal_phase(worker)
            elif "status" in event:
                self._handle_exit(self._workers[event["rank"]], event["status"])
            elif "notice" in event:
                self._on_message(0, {"kind": "notice", "text": event["notice"]})
            elif "server_status" in event:
                status, output = self._server.exit_report()
                raise WorkerFailed(0, f"the fork server was lost before it was ready: {describe_exit(status)}", output)

    def _handle_exit(self, worker: WorkerHandle, status: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while not worker.disconnected:  # the worker's last messages are handled before its exit
                self._receive(worker)
        self._disconnect(worker)
        worker.exited = True
        self._policy.process_exited(worker.rank)
        was_signalled = self._phase in (_SupervisorPhase.STOPPING, _SupervisorPhase.KILLING) and -status in (
            self._policy.stop_signal,
            signal.SIGKILL,
        )
        if not (worker.failed or was_signalled):
            self._handle_unreported_exit(worker, status)

    def _handle_unreported_exit(self, worker: WorkerHandle, status: int) -> None:
        """Handle the exit of a worker that has neither reported a failure nor been signalled."""
        failure = Failure(worker.rank, time.monotonic(), describe_exit(status))
        succeeded = worker.returned and status == 0
        if self._phase is _SupervisorPhase.RUNNING:
            others = sum(not other.exited for other in self._workers)
            if succeeded:
                verdict = self._policy.worker_returned(worker.rank, worker.result, others)
            else:
                lifetime = failure.at_seconds - worker.started_seconds
                verdict = self._policy.worker_failed(failure, others, lifetime)
            self._carry_out(worker, verdict)
        elif not succeeded:
            self._add_failure(failure)

    def _carry_out(self, worker: WorkerHandle, verdict: RestartVerdict) -> None:
        if verdict.notice:
            self._on_message(worker.rank, {"kind": "notice", "text": verdict.notice})
        if verdict.failure is not None:
            self._add_failure(verdict.failure)
        elif verdict.restart_in_seconds == 0:
            self._workers[worker.rank] = self._start(worker.spec)
        elif verdict.restart_in_seconds is not None:
            self._restarts[worker.rank] = time.monotonic() + verdict.restart_in_seconds

    def _add_failure(self, failure: Failure) -> None:
        self._failures.append(failure)
        if self._phase is _SupervisorPhase.RUNNING and failure.consequence:
            self._enter(_SupervisorPhase.AWAITING_CAUSE, _CAUSE_SECONDS)
        elif self._phase in (_SupervisorPhase.RUNNING, _SupervisorPhase.AWAITING_CAUSE) and not failure.consequence:
            self._enter(_SupervisorPhase.STOPPING, _STOP_SECONDS)

    def _handle_signals(self) -> None:
        for number in self._inbox.take():
            if not self._workers:
                raise Interrupted(number)
            if self._phase in (_SupervisorPhase.RUNNING, _SupervisorPhase.AWAITING_CAUSE):
                self._signal, self._signal_seconds = number, time.monotonic()
                self._enter(_SupervisorPhase.STOPPING, self._stop_seconds)
            elif number != signal.SIGHUP and time.monotonic() - self._signal_seconds > _SECOND_SIGNAL_SECONDS:
                self._enter(_SupervisorPhase.KILLING, _KILL_SECONDS)

    def _escalate(self) -> None:
        if self._phase is _SupervisorPhase.AWAITING_CAUSE:
            self._enter(_SupervisorPhase.STOPPING, _STOP_SECONDS)
        elif self._phase in (_SupervisorPhase.STOPPING, _SupervisorPhase.FINISHING):
            self._enter(_SupervisorPhase.KILLING, _KILL_SECONDS)
        else:
            rank = next(worker.rank for worker in self._workers if not worker.exited)
            raise WorkerFailed(rank, f"its process still runs {_KILL_SECONDS:g} s after SIGKILL")

    def _enter(self, phase: _SupervisorPhase, seconds: float) -> None:
        self._phase, self._deadline_seconds = phase, time.monotonic() + seconds
        self._restarts.clear()
        for worker in self._workers:
            self._signal_phase(worker)

    def _signal_phase(self, worker: WorkerHandle) -> None:
        """Send `worker` the signal of the current phase; also called for a process that starts within the phase."""
        if worker.pid is None or worker.exited:
            return
        if self._phase is _SupervisorPhase.STOPPING:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, self._policy.stop_signal)
        elif self._phase is _SupervisorPhase.KILLING:
            process.kill_group(worker.pid)

    @property
    def _is_complete(self) -> bool:
        return self._policy.is_complete([worker.result for worker in self._workers])

    def _outcome(self) -> list[Any]:
        exits = {worker.rank: worker.script_exit for worker in self._workers if worker.script_exit}
        cause = first_cause(self._failures, exits).error() if self._failures else None
        if isinstance(cause, InvalidInput) and self._last_step:  # raised by a worker that joined later
            cause = RunFailed(f"after {self._last_step} step{'s' * (self._last_step != 1)}: {cause}")
        results = [worker.result for worker in self._workers]
        if self._signal is not None:
            complete = self._is_complete or all(worker.returned for worker in self._workers)
            raise Interrupted(self._signal, results if complete else ()) from cause
        if cause and not self._completed:
            raise cause
        if reason := self._policy.incomplete_reason(results):
            raise Interrupted(STOP, words=reason)
        return results
