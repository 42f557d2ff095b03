"""A discrete-event simulation: threads on a virtual clock, of which exactly one runs at a time.

Each worker has a clock. The running worker continues until its clock moves or it waits. Then the worker with the
smallest clock runs, and among equal clocks the one with the smallest rank. Events therefore happen in the order of
virtual time, and a run depends on its inputs only. Nothing sleeps.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch


class VirtualScheduler:
    """The clocks of all workers, and the selection of the worker that runs.

    torch's and Python's process-wide random generators belong to the running worker: each worker finds them as it
    left them, as if it had a process of its own.

    Args:
        size: the number of workers.
        seed: seeds each worker's random generators, together with the worker's rank.
        deadlock: called when all workers that have not finished wait; must `wake` one of them.
    """

    def __init__(self, size: int, seed: int, deadlock: Callable[[], None]) -> None:
        self.clock = [0.0] * size
        self.now = 0.0
        self.waiting: set[int] = set()
        self._deadlock = deadlock
        self._wake_at = [0.0] * size
        self._ready = [(0.0, rank) for rank in range(size)]
        self._timer_at = [math.inf] * size
        self._timers: list[tuple[float, int]] = []
        self._may_run = [threading.Lock() for _ in range(size)]
        for lock in self._may_run:
            lock.acquire()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._events_made = 0
        self._seed = seed
        self._random = [_random_state(seed, rank) for rank in range(size)]
        self._over = threading.Event()
        self._interrupted = False
        self._failure: BaseException | None = None  # what an event has raised

    def run(self, run_worker: Callable[[int], None]) -> None:
        """Run ``run_worker(rank)``, which must not raise, for each worker. Returns when all have finished.

        Raises what an event has raised; the workers then end with SystemExit where they wait.
        """
        threads = [
            threading.Thread(
                target=self._run_worker, args=(rank, run_worker), name=f"virtual worker {rank}", daemon=True
            )
            for rank in range(len(self.clock))
        ]
        outside, intra_op = _get_random(), torch.get_num_threads()
        torch.set_num_threads(1)  # else every thread would start an OpenMP pool
        try:
            for thread in threads:
                thread.start()
            with suppress(SystemExit):  # an event has raised
                self._run_next()
            self._over.wait()
            for thread in threads:
                thread.join()
            if self._failure is not None:
                raise self._failure
        finally:
            if not self._over.is_set():  # Ctrl-C
                self._interrupt()
            torch.set_num_threads(intra_op)
            _set_random(outside)

    def advance(self, rank: int, seconds: float) -> None:
        """Move the clock of the running worker `rank`; workers with earlier clocks run first."""
        self._schedule(rank, self.clock[rank] + seconds)
        self._yield(rank)

    def wait(self, rank: int, at: float, until: float) -> None:
        """Suspend the running worker `rank` until time `at` (infinity: unknown) or a `wake`, at most until `until`."""
        self.waiting.add(rank)
        self._timer_at[rank] = until
        heapq.heappush(self._timers, (until, rank))
        self.wake(rank, at)
        self._yield(rank)

    def wake(self, rank: int, time: float) -> None:
        """Have worker `rank`, if it waits, continue at `time` or earlier."""
        if rank in self.waiting and time < self._wake_at[rank]:
            self._schedule(rank, time)

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Have ``event()`` called at `time`, before any worker continues at that time.

        If `event` raises, the simulation ends. Events of the same time are called in the order in which they were
        scheduled, in the thread of any worker.
        """
        heapq.heappush(self._events, (max(time, self.now), self._events_made, event))
        self._events_made += 1

    def own_random(self, name: str) -> Random:
        """New random generators for an object that is not a worker."""
        return Random(*_random_state(self._seed, name))

    @contextmanager
    def drawing_from(self, source: Random) -> Iterator[None]:
        """A context in which random numbers come from `source`; the workers' generators stay unchanged."""
        outside = _get_random()
        _set_random((source.torch, source.python))
        try:
            with torch.enable_grad():  # the default of a new thread
                yield
        finally:
            source.torch, source.python = _get_random()
            _set_random(outside)

    def _schedule(self, rank: int, time: float) -> None:
        self._wake_at[rank] = time
        heapq.heappush(self._ready, (time, rank))

    def _run_worker(self, rank: int, run_worker: Callable[[int], None]) -> None:
        self._may_run[rank].acquire()
        if self._interrupted:
            return
        _set_random(self._random[rank])
        try:
            run_worker(rank)
            self._run_next()
        except SystemExit:
            if not self._interrupted:
                raise

    def _yield(self, rank: int) -> None:
        next_rank = self._pick()
        if next_rank == rank:
            return
        self._random[rank] = _get_random()
        assert next_rank is not None  # at least `rank` itself has not finished
        self._may_run[next_rank].release()
        self._may_run[rank].acquire()
        if self._interrupted:
            raise SystemExit
        _set_random(self._random[rank])

    def _run_next(self) -> None:
        next_rank = self._pick()
        if next_rank is None:
            self._over.set()
        else:
            self._may_run[next_rank].release()

    def _pick(self) -> int | None:
        """The worker with the smallest clock of those that can continue; None when all have finished."""
        while True:
            if self._interrupted:
                raise SystemExit
            _drop(self._ready, self._wake_at)
            _drop(self._timers, self._timer_at)
            if not self._ready and not self.waiting:
                return None
            if not self._ready and not self._events:
                self._deadlock()
                continue
            queue = min((queue for queue in (self._ready, self._timers) if queue), key=lambda queue: queue[0])
            if not self._events or queue[0][0] < self._events[0][0]:
                return self._resume(*heapq.heappop(queue))
            self.now, _, event = heapq.heappop(self._events)
            try:
                event()
            except BaseException as error:
                self._failure = error
                self._interrupt()
                self._over.set()

    def _interrupt(self) -> None:
        """Have every worker end where it waits."""
        self._interrupted = True
        for lock in self._may_run:
            with suppress(RuntimeError):  # this worker may run already
                lock.release()

    def _resume(self, time: float, rank: int) -> int:
        self.now = self.clock[rank] = max(self.clock[rank], time)
        self._wake_at[rank] = self._timer_at[rank] = math.inf
        self.waiting.discard(rank)
        return rank


def _drop(queue: list[tuple[float, int]], valid: list[float]) -> None:
    """Remove entries of workers from the front of `queue` whose time is no longer the one in `valid`."""
    while queue and valid[queue[0][1]] != queue[0][0]:
        heapq.heappop(queue)


@dataclass
class Random:
    """The states of torch's and of Python's random generator."""

    torch: torch.Tensor
    python: object


_Random = tuple[torch.Tensor, object]


def _get_random() -> _Random:
    return torch.default_generator.get_state(), random.getstate()


def _set_random(state: _Random) -> None:
    torch.default_generator.set_state(state[0])
    random.setstate(state[1])  # type: ignore[arg-type]


def _random_state(seed: int, rank: int | str) -> _Random:
    source = random.Random(f"{seed} {rank}")
    return torch.Generator().manual_seed(source.getrandbits(63)).get_state(), source.getstate()
