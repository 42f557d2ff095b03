"""Balances work between unequal workers by each worker's time per micro-batch, and reports stragglers.

A worker measures its own time, including the loading of data, but not the waiting for others. From the times of all
workers, which are the same numbers on every worker, `unisono.data.work_shares` computes the shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from unisono.data import MicroBatchAllocation, PaceHistory, slowness
from unisono.observe import Recorder

SLOW = 3.0  # a worker that takes this many times as long as the others is reported
UNEQUAL = 0.2  # the fraction of a step's time that balancing must save to be suggested


class RebalanceMode(Enum):
    """Whether the workers' shares of the work follow their speeds."""

    YES = "yes"
    IF_ASKED = "if asked"  # they could, but that changes the rounding of the result, and the user has not asked for it
    NO = "no"


@dataclass(frozen=True)
class WorkerClock:
    """Measures one worker's own time.

    Args:
        now: returns the time in seconds.
        waited: returns the total seconds for which this worker has waited for others during computation.
        fetching: returns the total seconds spent on prefetching this worker's batches. They are hidden while other
            workers are slower, but not if this worker got more batches.
        synchronize: waits for all work that is queued on the device.
    """

    now: Callable[[], float]
    waited: Callable[[], float]
    fetching: Callable[[], float]
    synchronize: Callable[[], None] = lambda: None


class LoadBalancer:
    """Measures one worker, and adapts the shares of all workers to their speeds.

    Args:
        shares: the allocation of micro-batches to all workers.
        mode: whether the allocation follows the workers' speeds.
        worker_name: maps a rank to the worker's name.
        remove_slower_than: a worker that takes more than this many times as long as the others is asked to leave.

    Attributes:
        pace: this worker's seconds per micro-batch in its last step; 0: not known yet.
        asked_to_leave: the ranks of the workers that are slower than `remove_slower_than` allows; equal on all workers.
    """

    def __init__(
        self, shares: MicroBatchAllocation, mode: RebalanceMode, rank: int, record: Recorder, clock: WorkerClock,
        worker_name: Callable[[int], str] = str, remove_slower_than: float | None = None,
    ) -> None:  # fmt: skip
        self.shares, self.mode, self.rank, self.record = shares, mode, rank, record
        self._clock, self._worker_name, self.remove_slower_than = clock, worker_name, remove_slower_than
        self.pace = 0.0
        self.asked_to_leave: frozenset[int] = frozenset()
        self._history = PaceHistory()
        self._slowness: list[float] = []
        self._reported: set[int] = set()
        self._suggested = False

    @property
    def leave_requested(self) -> bool:
        """Whether this worker is asked to leave."""
        return self.rank in self.asked_to_leave

    @contextmanager
    def measured(self, micro_batches: int) -> Iterator[None]:
        """Measure the pace of the block, which computes `micro_batches` micro-batches."""
        began, fetched = self._clock.now() - self._clock.waited(), self._clock.fetching()
        yield
        self._clock.synchronize()
        self.pace = (
            max(self._clock.now() - self._clock.waited() - began, self._clock.fetching() - fetched) / micro_batches
        )

    def update(self, done: int, paces: Sequence[float]) -> None:
        """After `done` steps: record the paces of all workers, which were measured in the step before the last one."""
        if done < self.shares.settled_from + 2:
            return
        seconds = self._history.add(paces, max(self.shares.counts)) if len(paces) > 1 else None
        if seconds is not None:
            self._evaluate(done, seconds)

    def _evaluate(self, done: int, seconds: Sequence[float]) -> None:
        if self.mode is RebalanceMode.YES and self.shares.rebalance(done, seconds):
            self.record.event("shares", step=done, micro_batches=self.shares.counts, seconds=list(seconds))
        now = slowness(seconds)
        lasting = [min(before, after) for before, after in zip(self._slowness or [1.0] * len(now), now)]
        if self.mode is RebalanceMode.IF_ASKED and self._slowness and not self._suggested:
            self._suggest_balancing(done, seconds)
        self._slowness = now
        for worker, times in enumerate(lasting):
            self._report_if_slow(done, worker, times)

    def _report_if_slow(self, done: int, worker: int, times: float) -> None:
        """Report `worker` if it is slow: for some time, it has taken `times` as long as the others."""
        limit = self.remove_slower_than
        leaves = limit is not None and times > limit and worker not in self.asked_to_leave
        if leaves or (times > SLOW and worker not in self._reported):
            self._reported.add(worker)
            name = self._worker_name(worker)
            words = f"worker {name} takes {times:.1f} times as long for a micro-batch as the others"
            self.record.event("slow worker", step=done, worker=name, times=times, removed=leaves,
                              words=f"{words}; {self._consequence(worker, leaves)}")  # fmt: skip
        if leaves:
            self.asked_to_leave |= {worker}

    def _consequence(self, worker: int, leaves: bool) -> str:
        if leaves:
            return f"it is asked to leave, by remove_slower_than = {self.remove_slower_than:g}"
        advice = "look at what else runs on its machine, and at its disk; with remove_slower_than it would leave"
        if self.mode is not RebalanceMode.YES:
            return advice
        return f"it gets {self.shares.counts[worker]} of {self.shares.micro_batches} micro-batches; {advice}"

    def _suggest_balancing(self, done: int, seconds: Sequence[float]) -> None:
        """Report how much time balancing would save, if that is much; at most once."""
        saved = self.shares.could_save(seconds)
        if saved > UNEQUAL:
            self._suggested = True
            words = (
                f"workers are not equally fast: {', '.join(f'{each:.3g}' for each in seconds)} s for a micro-batch. "
                f"With balance = on, steps would take {1 - saved:.0%} of their present time. Without Exact(), the "
                "rounding of sums then depends on measured speeds, and differs from run to run"
            )
            self.record.event("unequal workers", step=done, seconds=list(seconds), words=words)
