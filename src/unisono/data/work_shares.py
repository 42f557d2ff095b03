"""Workers that are not alike: who computes how many micro-batches of a step, so that all are done at the same time.

    paces, said with every step ─► Stock: medians over some steps ─► Shares.follow ─► from a later step on, other ranges

All workers hear the same numbers between the same two steps, so they come to the same shares without a message.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import median

from unisono.data.load_modes import Inline, Load, Processes, Threads

STOCK_STEPS = 12  # of which more than half have to say the same
STOCK_SECONDS = 0.5  # however short steps are: what else runs on a machine comes and goes within some of these
WORTH = 0.04  # of a step's time; less is not told from chance by that many steps


def fastest_counts(micro_batches: int, seconds: Sequence[float]) -> list[int]:
    """How many micro-batches each worker computes, at least one, so that the last is done soonest.

    One after the other goes to whoever would be done with it first, which is optimal for equal jobs; ties to the lower
    rank.

    Args:
        seconds: that each worker takes for one of them.

    Raises:
        ValueError: more workers than micro-batches, or a time that is not finite and above 0.
    """
    if not 0 < len(seconds) <= micro_batches or not all(0 < each < math.inf for each in seconds):
        raise ValueError(f"{micro_batches} micro-batches for workers that take {list(seconds)} seconds each")
    counts = [1] * len(seconds)
    next_done = [(2 * each, worker) for worker, each in enumerate(seconds)]
    heapq.heapify(next_done)
    for _ in range(micro_batches - len(seconds)):
        worker = next_done[0][1]
        counts[worker] += 1
        heapq.heapreplace(next_done, ((counts[worker] + 1) * seconds[worker], worker))
    return counts


def last_done(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds until all workers have computed their `counts` of micro-batches, at `seconds` each."""
    return max(count * each for count, each in zip(counts, seconds, strict=True))


def slowness(seconds: Sequence[float]) -> list[float]:
    """How many times as long as the others, by their median, each worker takes; of one worker, 1."""
    if len(seconds) == 1:
        return [1.0]
    return [each / median([*seconds[:worker], *seconds[worker + 1 :]]) for worker, each in enumerate(seconds)]


def most_ahead(load: Load | None) -> int:
    """How many micro-batches a worker fetches ahead at most; with None each chooses by itself."""
    if isinstance(load, Processes):
        return load.count * load.ahead
    return 0 if isinstance(load, Inline) else (load or Threads()).ahead


class PaceHistory:
    """Everybody's seconds per micro-batch: their medians, taken each time that enough steps were heard of."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._heard: list[Sequence[float]] = []
        self._seconds = 0.0

    def add(self, paces: Sequence[float], micro_batches: int) -> list[float] | None:
        """Of one step, in which a worker had so many at most; 0 from a worker that does not know. Returns the medians
        when they are due."""
        if all(0 < pace < math.inf for pace in paces):
            self._heard.append(paces)
            self._seconds += micro_batches * max(paces)
        if len(self._heard) < STOCK_STEPS or self._seconds < STOCK_SECONDS:
            return None
        medians = [median(each) for each in zip(*self._heard, strict=True)]
        self._begin()
        return medians


class MicroBatchAllocation:
    """The micro-batches of each worker, step by step: contiguous ranges, in the order of ranks.

    Args:
        ranges: of the first steps, one for each lane of workers (see `unisono.layout.RankMesh`).
        lane: this worker's.
        speakers: a worker of each lane, to be named.
        ahead: see `most_ahead`. Shares change from a step on of which no worker has fetched anything, so nothing is
            fetched for nothing, or late.
    """

    def __init__(self, ranges: Sequence[range], lane: int, speakers: Sequence[int], ahead: int) -> None:
        self._since = [(0, list(ranges))]
        self._lane, self._speakers, self._ahead = lane, speakers, ahead
        self._asked = -1

    @property
    def micro_batches(self) -> int:
        """Of a step, over all workers."""
        return self._since[-1][1][-1].stop

    @property
    def counts(self) -> list[int]:
        """How many micro-batches each lane has, once the latest change holds."""
        return [len(each) for each in self._since[-1][1]]

    @property
    def settled_from(self) -> int:
        """The step from which on the latest change holds."""
        return self._since[-1][0]

    def mine(self, step: int) -> range:
        """This worker's micro-batches of `step`."""
        self._asked = max(self._asked, step)
        return self._at(step)[self._lane]

    def worker_of(self, step: int, micro_batch: int) -> int:
        """Who computes `micro_batch` of `step`."""
        return next(who for who, each in zip(self._speakers, self._at(step), strict=True) if micro_batch in each)

    def could_save(self, seconds: Sequence[float]) -> float:
        """The part of a step's time that the best shares would save, where micro-batches take each lane `seconds`."""
        best = fastest_counts(self.micro_batches, seconds)
        return 1 - last_done(best, seconds) / last_done(self.counts, seconds)

    def rebalance(self, done: int, seconds: Sequence[float]) -> bool:
        """After `done` steps: have the best shares soon, if they are worth a change. Returns whether there is one.
        A change that does not hold yet is waited for first."""
        if done < self.settled_from or self.could_save(seconds) < WORTH:
            return False
        first = done + -(-self._ahead // min(self.counts))
        assert first > self._asked, "what is fetched already changes no more"
        ends = list(accumulate(fastest_counts(self.micro_batches, seconds)))
        ranges = [range(start, end) for start, end in zip([0, *ends], ends)]
        self._since = [self._since[-1], (first, ranges)]
        return True

    def roll_back(self, step: int) -> None:
        """Training goes on from `step`, which is not after the one that is under way; what was fetched is let go."""
        self._asked = step - 1

    def _at(self, step: int) -> list[range]:
        first, ranges = self._since[-1]
        return ranges if step >= first else self._since[0][1]
