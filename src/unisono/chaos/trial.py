"""Trials: one run without faults, others with faults, and their comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from unisono.chaos.fault_record import FaultRecord
from unisono.chaos.fault_schedule import FaultKind, FaultSchedule, draw
from unisono.chaos.outcome import Row, RunOutcome, compare
from unisono.compress import Exact
from unisono.config import RECOVERY_REQUIREMENTS, Config
from unisono.errors import InvalidInput
from unisono.run.resolve import resolve_config
from unisono.tasks.task import Task

NO_FAULTS = FaultSchedule(0, ())
_DEFAULTS = {"workers": 4, "compress": "Exact()", "checkpoint_every": 10}
_RESERVED = ("run_dir", "resume")


class Ground(Protocol):
    """Where runs are executed: on virtual processes, or on processes of this machine."""

    def run(
        self, name: str, schedule: FaultSchedule, baseline: RunOutcome | None, injected: list[FaultRecord]
    ) -> RunOutcome:
        """Execute a run with the faults of `schedule`.

        Args:
            name: the name of the run, which no other run has.
            baseline: the outcome of the run without faults; None if this run is the one without faults.
            injected: receives the records of the injected faults, also if the run fails.
        """


@dataclass(frozen=True)
class Trial:
    """A run with faults, compared with the run without faults, the baseline.

    Args:
        schedule: the faults that were planned.
        injected: the faults that were injected.
        rows: the comparison; empty if the run failed.
        failed: why the run did not finish, as text; empty if it finished.
    """

    schedule: FaultSchedule
    injected: list[FaultRecord] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    failed: str = ""

    @property
    def differences(self) -> list[str]:
        """All differences from the baseline, as text."""
        return [self.failed] if self.failed else [f"{row.name}: {row.differs}" for row in self.rows if row.differs]


def trials(
    ground: Ground, baseline: RunOutcome, seeds: Iterable[int], wanted: Mapping[FaultKind, int]
) -> Iterator[Trial]:
    """Yield one trial for each of `seeds`, with the `wanted` number of faults of each kind."""
    for seed in seeds:
        schedule, injected = draw(seed, wanted), list[FaultRecord]()
        try:
            faulty = ground.run(f"seed-{seed}", schedule, baseline, injected)
        except Exception as error:  # any failure is the result of this seed
            yield Trial(schedule, injected, failed=f"{type(error).__name__}: {error}")
        else:
            yield Trial(schedule, injected, compare(baseline, faulty))


def settings_of(task: Task, given: Mapping[str, Any], wanted: Mapping[FaultKind, int]) -> dict[str, Any]:
    """The settings `given`, and those that faults require: room for joining workers, checkpoints, records of all steps.

    Raises:
        InvalidInput: with these settings, workers of a run cannot join or leave.
    """
    for name in _RESERVED:
        if given.get(name):
            raise InvalidInput(name, given[name], "chaos chooses the directory of each run", "omit it")
    settings = {**_DEFAULTS, **given, "record_seconds": 0.0}
    config = resolve_config(task, settings)
    if config.workers < 2 or not config.recovers_from_loss:
        raise InvalidInput(
            "task", task.name, "workers of a run with these settings cannot join or leave",
            f"use two workers or more, elastic, with {RECOVERY_REQUIREMENTS}")  # fmt: skip
    return settings if config.max_workers is not None else {**settings, "max_workers": _most(config, wanted)}


def dependence(task: Task, settings: Mapping[str, Any]) -> str:
    """Why the bits of a run with these settings depend on its workers; empty if they do not."""
    config = resolve_config(task, settings)
    if config.takes_local_steps:
        return "with local steps the result depends on the workers that take part: losses and weights differ"
    if not isinstance(config.compress, Exact):
        return (
            "without --compress 'Exact()' the rounding of sums depends on the workers that take part: the last digits "
            "will differ"
        )
    return ""


def _most(config: Config, wanted: Mapping[FaultKind, int]) -> int:
    """The number of workers with all that may join, but no more than there are micro-batches in a step."""
    assert config.global_batch is not None
    assert config.micro_batch is not None
    all_of_them = config.workers + wanted.get(FaultKind.JOIN, 0) + bool(wanted.get(FaultKind.PARTITION, 0))
    return max(config.workers, min(all_of_them, config.global_batch // config.micro_batch))
