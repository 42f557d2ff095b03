"""Allocates micro-batches to workers of different speed, so that all finish a step at the same time.

    paces in control words ─► PaceHistory: medians over steps ─► MicroBatchAllocation.rebalance ─► from a later step on

All workers receive the same numbers between the same two steps, so they compute the same allocation without a message.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import median

from unisono.data.load_modes import Inline, Load, Processes, Threads

HISTORY_STEPS = 12  # a median over so many steps ignores outliers in fewer than half of them
HISTORY_SECONDS = 0.5  # the least time of these steps, as the load by other programs varies over a few times this long
MIN_GAIN = 0.04  # fraction of a step's time; smaller gains cannot be distinguished from noise with so few steps


def fastest_counts(micro_batches: int, seconds: Sequence[float]) -> list[int]:
    """The number of micro-batches of each worker, at least one, that minimizes the time of the slowest.

    Each micro-batch goes to the worker that would complete it first, which is optimal for equal jobs. Ties go to the
    lower rank.

    Args:
        seconds: the seconds that each worker takes per micro-batch.

    Raises:
        ValueError: there are more workers than micro-batches, or a time is not finite and above 0.
    """
    if not 0 < len(seconds) <= micro_batches or not all(0 < each < math.inf for each in seconds):
        raise ValueError(
            f"seconds={list(seconds)}: give 1 to {micro_batches} workers, as there are {micro_batches} micro-batches, "
            "and finite times above 0"
        )
    counts = [1] * len(seconds)
    next_done = [(2 * each, worker) for worker, each in enumerate(seconds)]
    heapq.heapify(next_done)
    for _ in range(micro_batches - len(seconds)):
        worker = next_done[0][1]
        counts[worker] += 1
        heapq.heapreplace(next_done, ((counts[worker] + 1) * seconds[worker], worker))
    return counts


def last_done(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds until all workers have computed `counts` micro-batches, at `seconds` each."""
    return max(count * each for count, each in zip(counts, seconds, strict=True))


def slowness(seconds: Sequence[float]) -> list[float]:
    """The time of each worker, divided by the median of the others; 1 for a single worker."""
    if len(seconds) == 1:
        return [1.0]
    return [each / median([*seconds[:worker], *seconds[worker + 1 :]]) for worker, each in enumerate(seconds)]


def most_ahead(load: Load | None) -> int:
    """The largest number of micro-batches that a worker fetches in advance; None: each worker chooses how it loads."""
    if isinstance(load, Processes):
        return load.count * load.ahead
    return 0 if isinstance(load, Inline) else (load or Threads()).ahead


class PaceHistory:
    """Medians of the workers' seconds per micro-batch, over a number of steps."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._paces: list[Sequence[float]] = []
        self._seconds = 0.0

    def add(self, paces: Sequence[float], micro_batches: int) -> list[float] | None:
        """Add the seconds per micro-batch of each worker in one step; returns the medians when there are enough.

        Args:
            paces: 0 for a worker without a measurement; the whole step is ignored then.
            micro_batches: the largest number of micro-batches that one worker computed in the step.
        """
        if all(0 < pace < math.inf for pace in paces):
            self._paces.append(paces)
            self._seconds += micro_batches * max(paces)
        if len(self._paces) < HISTORY_STEPS or self._seconds < HISTORY_SECONDS:
            return None
        medians = [median(each) for each in zip(*self._paces, strict=True)]
        self._begin()
        return medians


class MicroBatchAllocation:
    """The micro-batches that each data-parallel rank computes at every step: contiguous ranges, in order.

    Workers that compute a micro-batch together have the same data-parallel rank; without a layout each worker has its
    own.

    Args:
        ranges: the ranges of the first steps, one for each data-parallel rank.
        batch_index: the data-parallel rank of this worker.
        representatives: for each data-parallel rank one worker, to be named in messages.
        ahead: see `most_ahead`. A new allocation applies from the first step of which no worker has fetched a batch,
            so no batch is fetched in vain, or late.
    """

    def __init__(self, ranges: Sequence[range], batch_index: int, representatives: Sequence[int], ahead: int) -> None:
        self._since = [(0, list(ranges))]
        self._batch_index, self._representatives, self._ahead = batch_index, representatives, ahead
        self._last_requested = -1

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a step, over all workers."""
        return self._since[-1][1][-1].stop

    @property
    def counts(self) -> list[int]:
        """The number of micro-batches of each data-parallel rank after the latest change."""
        return [len(each) for each in self._since[-1][1]]

    @property
    def settled_from(self) -> int:
        """The first step to which the latest change applies."""
        return self._since[-1][0]

    def mine(self, step: int) -> range:
        """The micro-batches of this worker at `step`."""
        self._last_requested = max(self._last_requested, step)
        return self._at(step)[self._batch_index]

    def worker_of(self, step: int, micro_batch: int) -> int:
        """A worker that computes `micro_batch` of `step`."""
        return next(
            rank for rank, each in zip(self._representatives, self._at(step), strict=True) if micro_batch in each
        )

    def could_save(self, seconds: Sequence[float]) -> float:
        """The fraction of a step's time that the best allocation would save, at `seconds` per micro-batch."""
        best = fastest_counts(self.micro_batches, seconds)
        return 1 - last_done(best, seconds) / last_done(self.counts, seconds)

    def rebalance(self, done: int, seconds: Sequence[float]) -> bool:
        """After `done` steps, schedule the best allocation if it saves enough time; returns whether it does.

        Does nothing until an earlier change has taken effect.
        """
        if done < self.settled_from or self.could_save(seconds) < MIN_GAIN:
            return False
        first = done + -(-self._ahead // min(self.counts))
        assert first > self._last_requested, "no worker may have fetched batches of the first step"
        ends = list(accumulate(fastest_counts(self.micro_batches, seconds)))
        ranges = [range(start, end) for start, end in zip([0, *ends], ends)]
        self._since = [self._since[-1], (first, ranges)]
        return True

    def roll_back(self, step: int) -> None:
        """Continue with `step` instead of the step after the current one; batches fetched in advance are discarded."""
        self._last_requested = step - 1

    def _at(self, step: int) -> list[range]:
        first, ranges = self._since[-1]
        return ranges if step >= first else self._since[0][1]
