"""One run without faults, others with them, and what is the same about them."""

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
from unisono.run.resolve import settle
from unisono.tasks.task import Task

NO_FAULTS = FaultSchedule(0, ())
_DEFAULTS = {"workers": 4, "compress": "Exact()", "checkpoint_every": 10}
_RESERVED = ("run_dir", "resume")


class Ground(Protocol):
    """Where runs take place."""

    def run(
        self, name: str, schedule: FaultSchedule, undisturbed: RunOutcome | None, happened: list[FaultRecord]
    ) -> RunOutcome:
        """What a run comes to that `schedule` befalls.

        Args:
            undisturbed: the same run without faults; None if this is that.
            happened: takes what befell it, also where it fails.
        """


@dataclass(frozen=True)
class Trial:
    """A run with faults beside the one without.

    Args:
        rows: what was compared; empty where the run failed.
        failed: why it came to no end, in words.
    """

    schedule: FaultSchedule
    injected: list[FaultRecord] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    failed: str = ""

    @property
    def differences(self) -> list[str]:
        """All that is not as it was without faults, in words."""
        return [self.failed] if self.failed else [f"{row.name}: {row.differs}" for row in self.rows if row.differs]


def trials(
    ground: Ground, undisturbed: RunOutcome, seeds: Iterable[int], wanted: Mapping[FaultKind, int]
) -> Iterator[Trial]:
    """One for each seed."""
    for seed in seeds:
        schedule, happened = draw(seed, wanted), list[FaultRecord]()
        try:
            disturbed = ground.run(f"seed-{seed}", schedule, undisturbed, happened)
        except Exception as error:  # whatever it is, it is what this seed is about
            yield Trial(schedule, happened, failed=f"{type(error).__name__}: {error}")
        else:
            yield Trial(schedule, happened, compare(undisturbed, disturbed))


def settings_of(task: Task, given: Mapping[str, Any], wanted: Mapping[FaultKind, int]) -> dict[str, Any]:
    """What was given, and what faults need: room for whoever joins, checkpoints, every step on record.

    Raises:
        InvalidInput: workers of such a run cannot come and go.
    """
    for name in _RESERVED:
        if given.get(name):
            raise InvalidInput(name, given[name], "each run is one of ours", "leave it out")
    settings = {**_DEFAULTS, **given, "record_seconds": 0.0}
    config = settle(task, settings)
    if config.workers < 2 or not config.recovers_from_loss:
        raise InvalidInput(
            "task", task.name, "workers of such a run cannot come and go",
            f"use two workers or more, elastic, with {RECOVERY_REQUIREMENTS}")  # fmt: skip
    return settings if config.max_workers is not None else {**settings, "max_workers": _most(config, wanted)}


def dependence(task: Task, settings: Mapping[str, Any]) -> str:
    """Why the bits of such a run depend on who takes part; empty: they do not."""
    config = settle(task, settings)
    if config.takes_local_steps:
        return (
            "replicas that walk by themselves come to something else when others take part: losses and weights differ"
        )
    if not isinstance(config.compress, Exact):
        return (
            "without --compress 'Exact()' sums are rounded otherwise when other workers take part: the last digits "
            "will differ"
        )
    return ""


def _most(config: Config, wanted: Mapping[FaultKind, int]) -> int:
    """Room for all who may come, as far as each has a micro-batch."""
    assert config.global_batch is not None
    assert config.micro_batch is not None
    all_of_them = config.workers + wanted.get(FaultKind.JOIN, 0) + bool(wanted.get(FaultKind.PARTITION, 0))
    return max(config.workers, min(all_of_them, config.global_batch // config.micro_batch))
