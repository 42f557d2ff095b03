"""Runs on real processes of this machine, with faults injected from outside: signals and cut links."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.chaos.command_processes import Command
from unisono.chaos.fault_record import FaultRecord
from unisono.chaos.fault_schedule import FaultKind, FaultSchedule, Moment, Pending, RunStatus, Strike
from unisono.chaos.network_namespace import NetworkNamespace
from unisono.chaos.outcome import RunOutcome, losses
from unisono.errors import InvalidInput, UnisonoError
from unisono.membership.contact_file import read_contact
from unisono.membership.http_client import HttpConnection
from unisono.membership.messages import StatusMessage
from unisono.observe import write_config
from unisono.observe.event_log import FILE
from unisono.observe.record_files import SUMMARY
from unisono.run.spec import TaskSource

_POLL_SECONDS, _SHORT_POLL_SECONDS = 0.03, 0.002  # between two polls; shorter while a fault waits for its activity
_LEAST_SECONDS, _TIMES = 180.0, 20.0  # a run's timeout: the least, and as a multiple of the time of the baseline
_ENDED_SECONDS = 90.0  # how long launchers that joined may outlast the run; one that joins too late notices within 30
_LINES = 12  # how many lines of a command's output an error shows


@dataclass(frozen=True)
class ProcessGround:
    """Executes runs on processes of this machine, with or without faults.

    Args:
        source: what is trained.
        settings: fields of `Config`.
        directory: receives the run directories, and the output of the runs' processes.
    """

    source: TaskSource
    settings: Mapping[str, Any]
    directory: Path

    def run(
        self, name: str, schedule: FaultSchedule, baseline: RunOutcome | None, injected: list[FaultRecord]
    ) -> RunOutcome:
        """See `Ground.run`. The run directory is `name` in `directory`.

        Raises:
            UnisonoError: the run did not finish.
        """
        given = self.directory / "given"
        given.mkdir(exist_ok=True)
        write_config(given, self.settings, self.source.absolute(), self.source.arguments)
        with ExitStack() as stack:
            namespace = stack.enter_context(NetworkNamespace()) if schedule.count(FaultKind.PARTITION) else None
            words = ["train", "--config", str(given / "config.toml"), "--run-dir", str(self.directory / name)]
            words += ["--listen", namespace.address, "--certificate", "none"] if namespace else []
            train = Command(words, self.directory / f"{name}.log")
            stack.callback(train.end)
            steps, seconds = (baseline.steps, baseline.seconds) if baseline else (1, _LEAST_SECONDS)
            injector = _FaultInjector(self.directory / name, train, schedule, steps, namespace, injected)
            stack.callback(injector.end)
            injector.run_to_end(max(_LEAST_SECONDS, _TIMES * seconds))
            return _outcome(self.directory / name, train)


def _outcome(run: Path, train: Command) -> RunOutcome:
    if train.process.returncode:
        lines = train.output().splitlines()[-_LINES:]
        raise UnisonoError("\n".join([f"the run ended with exit code {train.process.returncode}:", *lines]))
    summary = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
    return RunOutcome(summary["steps"], summary["samples"], losses(run), summary["metrics"], summary["weights_sha256"],
                   seconds=summary["wall_seconds"])  # fmt: skip


@dataclass
class _FaultInjector:
    """Injects the faults of `schedule` into the run of the command `train`, and records them in `injected`.

    Args:
        run: the run directory.
        steps: the number of steps of the whole run.
        namespace: where a worker runs whose link is cut; None if no link is cut.
    """

    run: Path
    train: Command
    schedule: FaultSchedule
    steps: int
    namespace: NetworkNamespace | None
    injected: list[FaultRecord]

    def __post_init__(self) -> None:
        self._pending, self._started_at = Pending(self.schedule), time.monotonic()
        self._joined_commands: list[Command] = []
        self._temporary: list[
            tuple[float, str, signal.Signals | None]
        ] = []  # end time, victim, and the signal that ends the fault
        self._unreachable: set[str] = set()
        self._step, self._read = 0, 0
        self._connection: HttpConnection | None = None

    def run_to_end(self, most_seconds: float) -> None:
        """Inject faults until the run has finished.

        Raises:
            UnisonoError: the run, or a launcher that joined it, does not end in time.
        """
        waiting = False
        while not self.train.has_ended(_SHORT_POLL_SECONDS if waiting else _POLL_SECONDS):
            if time.monotonic() - self._started_at > most_seconds:
                raise UnisonoError(
                    f"the run has not finished after {most_seconds:.0f} s, at step {self._step:,}: see {self.train.log}"
                )
            self._end_expired()
            self._read_events()
            if self._pending.faults or self._temporary:
                waiting = self._inject_due()
        for each in self._joined_commands:
            if not each.has_ended(_ENDED_SECONDS):
                raise UnisonoError(
                    f"a launcher that joined still runs {_ENDED_SECONDS:.0f} s after the end of the run: see {each.log}"
                )

    def end(self) -> None:
        """Kill all launchers that joined and their workers, also frozen ones."""
        for each in self._joined_commands:
            each.end()
        if self._connection:
            self._connection.close()

    def _inject_due(self) -> bool:
        """Inject the faults that are due; returns whether a fault waits for an activity of the run."""
        share = self._step / self.steps
        waiting = [fault for fault in self._pending.faults if fault.after <= share]
        if self.namespace and not self._joined_commands and self._contact():
            self._join(self.namespace)
        if waiting:
            for strike in self._pending.due(self._run_status(share)):
                with suppress(ProcessLookupError):  # the process has just ended
                    self._inject(strike)
        return any(fault.moment is not Moment.ANY for fault in waiting)

    def _run_status(self, share: float) -> RunStatus:
        status = self._status()
        if status is None:
            return RunStatus(share)
        view = status.view
        works = {each.worker for each in status.workers if each.active_view == view.number}
        here = [name for name in view.members if name not in self._unreachable and self._command(name)]
        able = tuple(name for name in here if name in works or name in view.sources)
        givers = tuple(name for name in able if name in view.sources)
        takers = tuple(name for name in here if view.sources and name not in able)
        far = self._joined_commands[0] if self.namespace and self._joined_commands else None
        apart = tuple(name for name in able if far and self._command(name) is far)
        with suppress(OSError):  # there are no checkpoints yet
            names = os.listdir(self.run / "checkpoints")
            return RunStatus(share, any(name.startswith(".step") for name in names), able, givers, takers, apart)
        return RunStatus(share, False, able, givers, takers, apart)

    def _status(self) -> StatusMessage | None:
        if not self._contact() or self._connection is None:
            return None
        answer = self._connection.get("/v1/status", StatusMessage)
        return answer.body if answer else None

    def _contact(self) -> bool:
        """Whether the coordinator's address is known."""
        with suppress(InvalidInput):
            self._connection = self._connection or HttpConnection(read_contact(self.run), timeout_seconds=1.0)
        return self._connection is not None

    def _command(self, name: str) -> Command | None:
        """The command that started the worker `name`."""
        return next((each for each in (self.train, *self._joined_commands) if each.worker(name)), None)

    def _inject(self, strike: Strike) -> None:
        fault, victim = strike.fault, strike.victim
        until = time.monotonic() + fault.seconds
        match fault.kind:
            case FaultKind.KILL:
                self._send(victim, signal.SIGKILL)
                self._unreachable.add(victim)
            case FaultKind.FREEZE:
                self._send(victim, signal.SIGSTOP)
                self._unreachable.add(victim)
                self._temporary.append((until, victim, signal.SIGCONT))
            case FaultKind.PARTITION:
                assert self.namespace is not None
                self.namespace.cut()
                self._unreachable.add(victim)
                self._temporary.append((until, victim, None))
            case FaultKind.DRAIN:
                self._send(victim, signal.SIGTERM)
            case FaultKind.JOIN:
                self._join(None)
            case FaultKind.COORDINATOR:
                pid = self.train.coordinator()
                if pid is None:  # it was killed and is not restarted yet
                    raise ProcessLookupError
                os.kill(pid, signal.SIGKILL)
        self.injected.append(FaultRecord.of(strike, time.monotonic() - self._started_at, self._step))

    def _send(self, victim: str, number: signal.Signals) -> None:
        command = self._command(victim)
        pid = command.worker(victim) if command else None
        if pid:
            os.kill(pid, number)

    def _join(self, elsewhere: NetworkNamespace | None) -> None:
        number = len(self._joined_commands) + 1
        logs = self.run.parent / f"{self.run.name}-joined-{number}"
        words = ["join", "--run-dir", str(self.run), "--logs", str(logs)]
        before = elsewhere.command([]) if elsewhere else []
        self._joined_commands.append(Command(words, logs.with_suffix(".log"), before))

    def _end_expired(self) -> None:
        """End the temporary faults that have lasted long enough."""
        now = time.monotonic()
        for each in [each for each in self._temporary if each[0] <= now]:
            self._temporary.remove(each)
            _, victim, number = each
            self._unreachable.discard(victim)
            if number is None and self.namespace:
                self.namespace.mend()
            elif number is not None:
                with suppress(ProcessLookupError):
                    self._send(victim, number)

    def _read_events(self) -> None:
        """Read the events that the run has recorded since the last call."""
        with suppress(FileNotFoundError), (self.run / FILE).open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                event = json.loads(line)
                if event["event"] == "step":
                    self._step = max(self._step, event["step"])
