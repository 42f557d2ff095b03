"""Many threads on a made-up clock, of which exactly one runs at a time: a discrete-event simulation.

Each worker has a clock of its own. Whoever runs goes on until its clock moves or it waits; then the worker
with the least clock goes on, ties by rank. Events therefore happen in the order of virtual time, and a run
depends on nothing but its inputs. Nothing ever sleeps.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
from collections.abc import Callable

import torch


class Turns:
    """The clocks of all workers, and whose turn it is.

    Torch's and Python's process-wide random generators belong to the worker whose turn it is: each finds them
    as it left them, as if it were a process of its own.

    Args:
        size: number of workers.
        seed: of the workers' random generators, together with the rank.
        deadlock: called when every worker that is left waits; must `wake` one of them.
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
        self._turn = [threading.Lock() for _ in range(size)]
        for lock in self._turn:
            lock.acquire()
        self._random = [_random_state(seed, rank) for rank in range(size)]
        self._over = threading.Event()
        self._interrupted = False

    def run(self, live: Callable[[int], None]) -> None:
        """Run ``live(rank)`` for each worker; it must not raise. Returns when all have ended."""
        threads = [
            threading.Thread(target=self._live, args=(rank, live), name=f"virtual worker {rank}", daemon=True)
            for rank in range(len(self.clock))
        ]
        outside, intra_op = _get_random(), torch.get_num_threads()
        torch.set_num_threads(1)  # else every thread would bring up an OpenMP pool of its own
        try:
            for thread in threads:
                thread.start()
            self._pass_on()
            self._over.wait()
            for thread in threads:
                thread.join()
        finally:
            self._interrupted = not self._over.is_set()
            torch.set_num_threads(intra_op)
            _set_random(outside)

    def advance(self, rank: int, seconds: float) -> None:
        """Move the clock of `rank`, whose turn it is, and let those go first who are earlier now."""
        self._schedule(rank, self.clock[rank] + seconds)
        self._yield(rank)

    def wait(self, rank: int, at: float, until: float) -> None:
        """Give the turn away until time `at` (infinity: unknown) or a `wake`, at most until `until`."""
        self.waiting.add(rank)
        self._timer_at[rank] = until
        heapq.heappush(self._timers, (until, rank))
        self.wake(rank, at)
        self._yield(rank)

    def wake(self, rank: int, time: float) -> None:
        """Worker `rank`, if it waits, goes on at `time` or earlier."""
        if rank in self.waiting and time < self._wake_at[rank]:
            self._schedule(rank, time)

    def _schedule(self, rank: int, time: float) -> None:
        self._wake_at[rank] = time
        heapq.heappush(self._ready, (time, rank))

    def _live(self, rank: int, live: Callable[[int], None]) -> None:
        self._turn[rank].acquire()
        _set_random(self._random[rank])
        live(rank)
        self._pass_on()

    def _yield(self, rank: int) -> None:
        following = self._pick()
        if following == rank:
            return
        self._random[rank] = _get_random()
        assert following is not None  # at least `rank` itself is alive
        self._turn[following].release()
        self._turn[rank].acquire()
        if self._interrupted:  # by Ctrl-C in the thread that called `run`
            raise SystemExit
        _set_random(self._random[rank])

    def _pass_on(self) -> None:
        following = self._pick()
        if following is None:
            self._over.set()
        else:
            self._turn[following].release()

    def _pick(self) -> int | None:
        """The worker with the least clock among those that can go on; None when all have ended."""
        _drop(self._ready, self._wake_at)
        if not self._ready and self.waiting:
            self._deadlock()
            _drop(self._ready, self._wake_at)
        if not self._ready:
            return None
        _drop(self._timers, self._timer_at)
        queue = self._timers if self._timers and self._timers[0] < self._ready[0] else self._ready
        time, rank = heapq.heappop(queue)
        self.now = self.clock[rank] = max(self.clock[rank], time)
        self._wake_at[rank] = self._timer_at[rank] = math.inf
        self.waiting.discard(rank)
        return rank


def _drop(queue: list[tuple[float, int]], valid: list[float]) -> None:
    """Remove entries from the front that something earlier has overtaken."""
    while queue and valid[queue[0][1]] != queue[0][0]:
        heapq.heappop(queue)


_Random = tuple[torch.Tensor, object]


def _get_random() -> _Random:
    return torch.default_generator.get_state(), random.getstate()


def _set_random(state: _Random) -> None:
    torch.default_generator.set_state(state[0])
    random.setstate(state[1])  # type: ignore[arg-type]


def _random_state(seed: int, rank: int) -> _Random:
    source = random.Random(f"{seed} {rank}")
    return torch.Generator().manual_seed(source.getrandbits(63)).get_state(), source.getstate()
