"""Workers that are not alike: each says how long a micro-batch takes it, shares follow, and who lags far is named.

What is measured is this worker's own time, with its data and without waiting for others; what is done about it is
arithmetic, in `unisono.data.work_shares`, on numbers that all workers have heard alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from unisono.data import MicroBatchAllocation, PaceHistory, slowness
from unisono.observe import Recorder

SLOW = 3.0  # times as long as the others, and a worker is named
UNEQUAL = 0.2  # of a step's time that other shares would save, and it is said that they could be had


class RebalanceMode(Enum):
    """Whether shares follow speeds."""

    YES = "yes"
    IF_ASKED = "if asked"  # they could, but the user would see it in the result, and has not asked for it
    NO = "no"


@dataclass(frozen=True)
class WorkerClock:
    """Measures one worker's own time.

    Args:
        now: seconds.
        waited: seconds that this worker has waited for others while it computed, in all.
        fetching: seconds that fetching its batches ahead has taken, in all. They are hidden while other workers are
            slower, and would not be if this one had more batches.
        synchronize: returns when what was queued on the device is computed.
    """

    now: Callable[[], float]
    waited: Callable[[], float]
    fetching: Callable[[], float]
    synchronize: Callable[[], None] = lambda: None


class LoadBalancer:
    """One worker's part in balancing the load.

    Args:
        shares: the allocation of micro-batches to all workers.
        mode: whether it follows speeds.
        worker_name: name of the worker with a rank.
        remove_slower_than: a worker that takes so many times as long as the others is asked to leave.

    Attributes:
        pace: seconds per micro-batch of this worker in its last step; 0: not known yet.
        asked_to_leave: ranks of workers that are too slow for the user, the same on all workers.
    """

    def __init__(
        self, shares: MicroBatchAllocation, mode: RebalanceMode, rank: int, record: Recorder, clock: WorkerClock,
        worker_name: Callable[[int], str] = str, remove_slower_than: float | None = None,
    ) -> None:  # fmt: skip
        self.shares, self.mode, self.rank, self.record = shares, mode, rank, record
        self._clock, self._worker_name, self.remove_slower_than = clock, worker_name, remove_slower_than
        self.pace = 0.0
        self.asked_to_leave: frozenset[int] = frozenset()
        self._stock = PaceHistory()
        self._lagged: list[float] = []
        self._named: set[int] = set()
        self._hinted = False

    @property
    def leave_asked(self) -> bool:
        """Whether this worker is asked to leave."""
        return self.rank in self.asked_to_leave

    @contextmanager
    def measured(self, micro_batches: int) -> Iterator[None]:
        """Inside, so many micro-batches are computed."""
        began, fetched = self._clock.now() - self._clock.waited(), self._clock.fetching()
        yield
        self._clock.synchronize()
        self.pace = (
            max(self._clock.now() - self._clock.waited() - began, self._clock.fetching() - fetched) / micro_batches
        )

    def hear(self, done: int, paces: Sequence[float]) -> None:
        """After `done` steps, what all workers said. They said it during the last of these, of the one before."""
        if done < self.shares.settled_from + 2:
            return
        seconds = self._stock.add(paces, max(self.shares.counts)) if len(paces) > 1 else None
        if seconds is not None:
            self._take_stock(done, seconds)

    def _take_stock(self, done: int, seconds: Sequence[float]) -> None:
        if self.mode is RebalanceMode.YES and self.shares.rebalance(done, seconds):
            self.record.event("shares", step=done, micro_batches=self.shares.counts, seconds=list(seconds))
        now = slowness(seconds)
        lasting = [min(before, after) for before, after in zip(self._lagged or [1.0] * len(now), now)]
        if self.mode is RebalanceMode.IF_ASKED and self._lagged and not self._hinted:
            self._hint(done, seconds)
        self._lagged = now
        for worker, times in enumerate(lasting):
            self._judge(done, worker, times)

    def _judge(self, done: int, worker: int, times: float) -> None:
        """`worker` takes so many times as long as the others, and did when stock was taken before."""
        limit = self.remove_slower_than
        leaves = limit is not None and times > limit and worker not in self.asked_to_leave
        if leaves or (times > SLOW and worker not in self._named):
            self._named.add(worker)
            words = (
                f"worker {self._worker_name(worker)} takes {times:.1f} times as long for a micro-batch as the others"
            )
            self.record.event("slow worker", step=done, worker=self._worker_name(worker), times=times, removed=leaves,
                              words=f"{words}; {self._done_about(worker, leaves)}")  # fmt: skip
        if leaves:
            self.asked_to_leave |= {worker}

    def _done_about(self, worker: int, leaves: bool) -> str:
        if leaves:
            return f"it is asked to leave, by remove_slower_than = {self.remove_slower_than:g}"
        cure = "look at what else runs on its machine, and at its disk; with remove_slower_than it would leave"
        if self.mode is not RebalanceMode.YES:
            return cure
        return f"it gets {self.shares.counts[worker]} of {self.shares.micro_batches} micro-batches; {cure}"

    def _hint(self, done: int, seconds: Sequence[float]) -> None:
        """Say once that shares could follow speeds."""
        saved = self.shares.could_save(seconds)
        if saved > UNEQUAL:
            self._hinted = True
            words = (
                f"workers are not alike: they take {', '.join(f'{each:.3g}' for each in seconds)} s for a micro-batch. "
                f"With balance = on, steps would take {1 - saved:.0%} of their time; without Exact() the rounding of "
                "sums then depends on measured speeds, and is not the same from run to run"
            )
            self.record.event("unequal workers", step=done, seconds=list(seconds), words=words)
