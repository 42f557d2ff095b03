"""Executes runs on virtual processes, links, coordinator and clock: the seed determines all events."""

from __future__ import annotations

import dataclasses
import random
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.chaos.fault_record import FaultRecord
from unisono.chaos.fault_schedule import FaultKind, FaultSchedule, Pending, RunStatus, Strike
from unisono.chaos.outcome import RunOutcome, losses
from unisono.chaos.sample_audit import SampleCount, Samples
from unisono.chaos.virtual_cluster import Process, VirtualNetwork, VirtualRun
from unisono.checkpoint import Writer
from unisono.checkpoint.async_writer import WriteProgress
from unisono.comm import Link
from unisono.config import Config
from unisono.errors import UnisonoError
from unisono.launch import StopRequest, WorkerContext, WorkerIdentity
from unisono.observe import ThreadTracker
from unisono.run.elastic_run import policy_of
from unisono.run.resolve import resolve_config
from unisono.run.spec import PickledTask, Result, RunSpec
from unisono.run.worker import WorkerRun
from unisono.tasks.task import Task, with_data

_FIXED_SETTINGS = {"load": "Inline()", "threads": 1}  # no threads besides those of the virtual processes
_LINK = Link(bytes_per_second=12.5e6, latency_seconds=1e-3)  # slow enough for faults during a message
_NETWORK = VirtualNetwork(lost=0.01)
_MOST_SECONDS, _MORE_SECONDS = 120.0, 1.0  # the most virtual time of a run, and what each step adds; a tenth is typical
_UNKNOWN_STEPS = 1_000_000
_READY_SECONDS = (0.1, 1.0)  # bounds of the time from the start of a process until it is ready
_CHECKS_PER_VIEW = 4  # how many times after each change of view faults may be injected


@dataclass(frozen=True)
class VirtualGround:
    """Executes virtual runs, with or without faults.

    Args:
        task: what is trained.
        settings: fields of `Config`.
        config: the complete configuration that follows from `task` and `settings`.
    """

    task: Task
    settings: Mapping[str, Any]
    config: Config

    @staticmethod
    def of(task: Task, settings: Mapping[str, Any]) -> VirtualGround:
        """A ground for `task` and `settings`; settings that concern processes of this machine are replaced."""
        settings = {**settings, **_FIXED_SETTINGS}
        return VirtualGround(with_data(task), settings, resolve_config(task, settings))

    def run(
        self, name: str, schedule: FaultSchedule, baseline: RunOutcome | None, injected: list[FaultRecord]
    ) -> RunOutcome:
        """See `Ground.run`.

        Raises:
            UnisonoError: the run did not finish, or workers finished with different results.
            Exception: what a worker raised.
        """
        with tempfile.TemporaryDirectory() as directory:
            steps = baseline.steps if baseline else _UNKNOWN_STEPS
            trial = _VirtualTrial(self, schedule, steps, Path(directory), injected)
            return trial.outcome(trial.run.run(trial.run_worker))


@dataclass
class _VirtualTrial:
    """One virtual run."""

    ground: VirtualGround
    schedule: FaultSchedule
    steps: int
    path: Path
    injected: list[FaultRecord]

    def __post_init__(self) -> None:
        self._config = self.ground.config
        processes = self._config.workers + len(self.schedule.faults)  # a fault starts one process at most
        self.run = VirtualRun(policy_of(self._config), processes, _LINK, _NETWORK, self.schedule.seed,
                              most_seconds=_MOST_SECONDS + _MORE_SECONDS * self.steps)  # fmt: skip
        self.run.on_change, self._pending = self._inject_due, Pending(self.schedule)
        self._chance = random.Random(f"play {self.schedule.seed}")
        self._next, self._checked_views = self._config.workers, 0
        self._samples = Samples()
        data = SampleCount(self.ground.task.data, self._samples)
        self._task = dataclasses.replace(self.ground.task, data=data)
        self._spec = RunSpec(PickledTask(self._task.name, b""), self.ground.settings, self.path, time.time())
        for number in range(self._config.workers):
            self.run.begin(number)

    def run_worker(self, process: Process) -> Result | None:
        """Run one worker in the virtual process `process`."""
        self._samples.processes[threading.get_ident()] = process
        size = self._config.workers
        stop = _NoSignals()
        worker = WorkerContext(
            WorkerIdentity(process.number, size, process.number, size, "", "chaos"), lambda message: None, stop
        )
        run = WorkerRun(worker, self._spec, self._task, self._config, torch.device("cpu"), ThreadTracker(),
                    make_writer=_ImmediateWriter)  # fmt: skip
        return run.run(process)

    def outcome(self, results: Sequence[Any]) -> RunOutcome:
        """The common outcome of all workers that finished."""
        for result in results:
            if isinstance(result, Exception):
                raise result
        ended = [result for result in results if isinstance(result, Result)]
        if not ended:
            where = self._position()
            raise UnisonoError(f"the run has not finished after {self.run.scheduler.now:.0f} virtual seconds: {where}")
        first = ended[0]
        for other in ended:
            if (other.weights_sha256, other.steps) != (first.weights_sha256, first.steps):
                raise UnisonoError(
                    f"workers finished with different results: {first.weights_sha256} after step {first.steps}, "
                    f"{other.weights_sha256} after step {other.steps}"
                )
        used = self._samples.kept(first.steps)
        return RunOutcome(first.steps, sum(map(sum, (each.values() for each in used.values()))), losses(self.path),
                       first.metrics, first.weights_sha256, used)  # fmt: skip

    def _position(self) -> str:
        last = self.run.formed[-1] if self.run.formed else None
        return f"view {last.number} of {', '.join(last.members)} at step {self._step}" if last else "no view"

    @property
    def _step(self) -> int:
        return max(process.agent.version.step for process in self.run.processes)

    def _inject_due(self) -> None:
        """Inject the faults that are due; called after each change, and several times after a new view."""
        if len(self.run.formed) > self._checked_views:
            self._checked_views = len(self.run.formed)
            for _ in range(_CHECKS_PER_VIEW):
                self.run.scheduler.at(self.run.scheduler.now + self._chance.uniform(0, 0.1), self._inject_due)
        for strike in self._pending.due(self._run_status()):
            self._inject(strike)

    def _run_status(self) -> RunStatus:
        step, every = self._step, self._config.checkpoint_every
        view = self.run.formed[-1] if self.run.formed else None
        if view is None:
            return RunStatus(0.0)
        members = [self.run.processes[int(name)] for name in view.members]
        works = {p.name for p in members if p.agent.working and p.agent.view.number == view.number}
        able = tuple(p.name for p in members if p.reachable and (p.name in works or p.name in view.sources))
        takers = tuple(p.name for p in members if p.reachable and view.sources and p.name not in able)
        # A checkpoint is taken at the boundary of a step, and committed at the next boundary.
        saving = bool(every and step and step % every == 0)
        givers = tuple(name for name in able if name in view.sources)
        return RunStatus(step / self.steps, saving, able, givers, takers, cuttable=able)

    def _inject(self, strike: Strike) -> None:
        run, fault, victim = self.run, strike.fault, int(strike.victim or 0)
        effect = ""
        match fault.kind:
            case FaultKind.KILL:
                run.kill(victim)
                effect = f"worker {self._start_process()} takes its place"
            case FaultKind.FREEZE:
                run.freeze(victim, fault.seconds)
            case FaultKind.PARTITION:
                run.cut(victim, fault.seconds)
            case FaultKind.DRAIN:
                run.processes[victim].leave()
            case FaultKind.JOIN:
                effect = f"worker {self._start_process()}"
            case FaultKind.COORDINATOR:
                run.kill_coordinator(fault.seconds)
        self.injected.append(FaultRecord.of(strike, run.scheduler.now, self._step, effect))

    def _start_process(self) -> int:
        """Start one more process, which is ready soon; returns its number."""
        number = self._next
        self._next += 1
        self.run.scheduler.at(
            self.run.scheduler.now + self._chance.uniform(*_READY_SECONDS), lambda: self.run.begin(number)
        )
        return number


class _NoSignals(StopRequest):
    """The `StopRequest` of virtual processes, which receive no signals."""

    def listen(self) -> StopRequest:
        return self


class _ImmediateWriter(Writer):
    """A writer that has written everything whenever its state is read, so that nothing depends on the disk's speed."""

    @property
    def state(self) -> WriteProgress:
        self.finish()
        return super().state
