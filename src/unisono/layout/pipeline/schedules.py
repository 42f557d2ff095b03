"""Which worker holds which stages, and how many micro-batches a schedule can run: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import pipelining

from unisono.errors import InvalidInput


@dataclass(frozen=True)
class ScheduleKind:
    """The requirements of a schedule.

    Args:
        torch: torch's class for it.
        multi_stage: whether a worker may hold several stages.
        mirrored: whether worker r holds stages r and n - 1 - r of n, instead of r, r + workers, and so on.
        fallback: a schedule with the same placement of stages, which runs any number of micro-batches.
    """

    torch: type
    multi_stage: bool
    mirrored: bool
    fallback: str


SCHEDULES = {
    "GPipe": ScheduleKind(pipelining.ScheduleGPipe, False, False, "GPipe"),
    "1F1B": ScheduleKind(pipelining.Schedule1F1B, False, False, "GPipe"),
    "Interleaved1F1B": ScheduleKind(pipelining.ScheduleInterleaved1F1B, True, False, "LoopedBFS"),
    "LoopedBFS": ScheduleKind(pipelining.ScheduleLoopedBFS, True, False, "LoopedBFS"),
    "InterleavedZeroBubble": ScheduleKind(pipelining.ScheduleInterleavedZeroBubble, True, False, "LoopedBFS"),
    "ZBVZeroBubble": ScheduleKind(pipelining.ScheduleZBVZeroBubble, True, True, "ZBVZeroBubble"),
    "DualPipeV": ScheduleKind(pipelining.ScheduleDualPipeV, True, True, "ZBVZeroBubble"),
}


def kind(schedule: str) -> ScheduleKind:
    """The kind of the schedule with this name. Raises `InvalidInput` if there is no such schedule."""
    if schedule not in SCHEDULES:
        raise InvalidInput("schedule", schedule, "no such schedule", f"choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[schedule]


def stages_for(schedule: str, workers: int) -> int:
    """The default number of stages: two per worker where the schedule can use them."""
    return workers * (2 if kind(schedule).multi_stage else 1)


def worker_of(schedule: str, workers: int, stages: int, stage: int) -> int:
    """The worker that holds `stage`."""
    row, worker = divmod(stage, workers)
    return workers - 1 - worker if kind(schedule).mirrored and row % 2 else worker


def stages_of(schedule: str, workers: int, stages: int, worker: int) -> tuple[int, ...]:
    """The stages that `worker` holds, ascending."""
    return tuple(s for s in range(stages) if worker_of(schedule, workers, stages, s) == worker)


def possible(schedule: str, workers: int, stages: int, micro_batches: int) -> bool:
    """Whether the schedule can run this number of micro-batches in one step."""
    if micro_batches < 1:
        return False
    if schedule in ("1F1B", "DualPipeV"):
        return micro_batches >= stages
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return micro_batches % max(1, micro_batches // workers) == 0
    return True


def check(schedule: str, workers: int, stages: int, micro_batches: int) -> None:
    """Refuse what the schedule cannot run, before anything starts.

    Raises:
        InvalidInput: names the nearest number of stages or micro-batches that works.
    """
    chosen = kind(schedule)
    if chosen.mirrored and stages != 2 * workers:
        problem = f"{schedule} needs two stages on each of {workers} workers"
        raise InvalidInput("stages", stages, problem, f"cut into {2 * workers}")
    if not chosen.multi_stage and stages != workers:
        problem = f"{schedule} needs one stage on each of {workers} workers"
        raise InvalidInput("stages", stages, problem, f"cut into {workers}")
    if stages < workers or stages % workers:
        near = max(1, round(stages / workers)) * workers
        raise InvalidInput("stages", stages, f"not a multiple of the {workers} workers", f"cut into {near}")
    if not possible(schedule, workers, stages, micro_batches):
        near = nearest(schedule, workers, stages, micro_batches)
        raise InvalidInput("micro_batches", micro_batches, f"{schedule} cannot run this number with {stages} stages on "
                           f"{workers} workers", f"use {near} micro-batches per step")  # fmt: skip


def nearest(schedule: str, workers: int, stages: int, micro_batches: int) -> int:
    """The nearest number of micro-batches that the schedule can run; of two equally near ones, the larger."""
    distance = 0
    while True:
        for candidate in (micro_batches + distance, micro_batches - distance):
            if possible(schedule, workers, stages, candidate):
                return candidate
        distance += 1
