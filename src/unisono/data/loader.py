"""How a worker's own micro-batches get here, ahead of need."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, Protocol

from unisono.data.fetch import Fetch, Fetched, Key, timed
from unisono.data.load_modes import Inline, Load, Processes, Threads
from unisono.data.micro_batch_plan import MicroBatchPlan
from unisono.data.processes import LoadingProcesses
from unisono.errors import InvalidInput
from unisono.tensors.batch import Batch

INLINE_BELOW_BYTES = 1 << 20  # of what is in memory already: copied sooner than handed over
INLINE_BELOW_SECONDS = 300e-6
"""A hand-over between threads costs about a tenth of this; what is quicker is fetched when it is due."""

WorkItem = tuple[int, range, Iterator[tuple[int, Batch]]]
"""A step, one worker's own micro-batches of it, and their batches with their numbers."""

_log = logging.getLogger(__name__)


class Loader:
    """Loads this worker's micro-batches of the steps from `first_step` up to, not including, `last_step`.

    Make it before anything of ``torch.distributed``: `Processes` forks. The batches are the same under every
    way of loading and any number of workers.

    Attributes:
        ahead_seconds: in all, what it took to fetch ahead the batches that were asked for; where several processes
            fetch, their part of it. What is fetched when it is due is not in it.

    Args:
        dataset: map-style; ``__getitems__`` is used where it exists.
        mine: the micro-batches of this worker at a step.
        collate: makes a batch of a list of samples. Default: torch's.
        load: None fetches the first micro-batch and chooses: `Inline` if the dataset drew random numbers or
            took less than 300 us, else `Threads`.
        seed: of the random numbers that the dataset draws.
        notice: told one sentence for each loading process that died and was replaced.

    Raises:
        InvalidInput: `Threads` for a dataset that draws random numbers.
    """

    def __init__(
        self,
        dataset: Any,
        plan: MicroBatchPlan,
        mine: Callable[[int], range],
        collate: Callable[[list[Any]], Batch] | None = None,
        load: Load | None = None,
        seed: int = 0,
        first_step: int = 0,
        last_step: int = 0,
        notice: Callable[[str], None] = _log.warning,
    ) -> None:
        self._mine, self._notice = mine, notice
        self._fetch = Fetch(dataset, plan, collate, seed)
        keys = ((step, m) for step in range(first_step, last_step) for m in mine(step))
        self._probed: dict[Key, Batch] = {}
        self.ahead_seconds = 0.0
        if isinstance(load, Threads) or load is None:
            load = self._probe(next(keys, None), load)
        self.load: Load = load
        self._source = _source(load, self._fetch, keys, notice)

    def batches(self, step: int) -> Iterator[tuple[int, Batch]]:
        """This worker's micro-batches of `step` and their numbers, in order. A step may be asked for again.

        Raises:
            Exception: what the dataset raised, with a note that names sample and micro-batch.
            LoadingFailed: processes die again and again on the same sample.
        """
        return self._all(step, self._mine(step))

    def nonfinite_samples(self, step: int, micro_batch: int) -> list[int]:
        """The numbers of the samples of any worker's `micro_batch` that hold a number that is not finite; none where a
        batch does not show its samples."""
        return self._fetch.nonfinite_samples(step, micro_batch)

    def work_items(self, shares: Iterable[tuple[int, range]]) -> Iterator[WorkItem]:
        """What `shares` deal out, steps and micro-batches of each, one after the other, each with its batches and
        their numbers. `shares` is asked ahead of need, as far as batches are fetched ahead.

        Raises:
            Exception: what the dataset raised, with a note that names sample and micro-batch.
        """
        dealt: deque[tuple[int, range]] = deque()

        def keys() -> Iterator[Key]:
            for step, micro_batches in shares:
                dealt.append((step, micro_batches))
                yield from ((step, m) for m in micro_batches)

        self._source.close()
        if isinstance(self.load, Inline):
            dealing: Iterator[tuple[int, range]] = iter(shares)
        else:
            self._source = _source(self.load, self._fetch, keys(), self._notice)
            dealing = iter(lambda: dealt.popleft() if dealt else None, None)
        for step, micro_batches in dealing:
            yield step, micro_batches, self._all(step, micro_batches)

    def stacks(self) -> list[str]:
        """Where processes that fetch batches are in their code, see `Stacks.collect`; for any thread."""
        return self._source.stacks()

    def close(self) -> None:
        """End threads and processes. May be called twice."""
        self._source.close()

    def _all(self, step: int, micro_batches: range) -> Iterator[tuple[int, Batch]]:
        for micro_batch in micro_batches:
            yield micro_batch, self._batch(step, micro_batch)

    def _batch(self, step: int, micro_batch: int) -> Batch:
        key = step, micro_batch
        if key in self._probed:
            return self._probed.pop(key)
        while self._source.next is not None and self._source.next < key:
            self._source.take()  # a step was left out
        if self._source.next != key:
            return self._fetch.seeded(step, micro_batch)
        batch, seconds = self._source.take()
        self.ahead_seconds += seconds
        return batch

    def _probe(self, key: Key | None, load: Threads | None) -> Load:
        """Fetch `key` in this thread, and choose by what was seen."""
        if key is None:
            return load or Inline()
        began = time.perf_counter()
        self._probed[key], drew = (self._fetch(*key), False) if self._fetch.bulk else self._fetch.fetch_and_detect(*key)
        seconds = time.perf_counter() - began
        if drew and load:
            problem = "the dataset draws random numbers, and a thread would share its generators with the training"
            raise InvalidInput("load", load, problem, "use Processes() or Inline()")
        if drew:
            _log.warning("the dataset draws random numbers: it is loaded inline; load=Processes() loads it ahead")
        # The first fetch also pays for what is made once, so what it says of tensors in memory is too much.
        small = self._fetch.bulk and sum(t.nbytes for t in self._probed[key]) < INLINE_BELOW_BYTES
        return load or (Inline() if drew or small or seconds < INLINE_BELOW_SECONDS else Threads())


class _BatchSource(Protocol):
    """Batches in a fixed order, fetched ahead; `next` is the key of the one that `take` returns, with the seconds that
    fetching it took of what fetches."""

    @property
    def next(self) -> Key | None: ...
    def stacks(self) -> list[str]: ...
    def take(self) -> Fetched: ...
    def close(self) -> None: ...


def _source(load: Load, fetch: Fetch, keys: Iterator[Key], notice: Callable[[str], None]) -> _BatchSource:
    if isinstance(load, Threads):
        return _Thread(fetch, keys, load.ahead)
    if isinstance(load, Processes):
        return LoadingProcesses(fetch, keys, load, notice)
    return _Nothing()


class _Nothing:
    """Nothing is fetched ahead."""

    next: Key | None = None

    def take(self) -> Fetched:
        raise LookupError("nothing is fetched ahead")

    def stacks(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class _Thread:
    """One background thread; the futures of the next micro-batches, in order."""

    def __init__(self, fetch: Fetch, keys: Iterator[Key], ahead: int) -> None:
        self._fetch, self._keys = fetch, keys
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="unisono loader")
        self._futures: deque[tuple[Key, Future[Fetched]]] = deque()
        for _ in range(ahead):
            self._submit()

    @property
    def next(self) -> Key | None:
        return self._futures[0][0] if self._futures else None

    def take(self) -> Fetched:
        _, future = self._futures.popleft()
        self._submit()
        return future.result()

    def stacks(self) -> list[str]:
        return []  # its thread is one of this process

    def close(self) -> None:
        self._futures.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> None:
        for key in islice(self._keys, 1):
            self._futures.append((key, self._pool.submit(timed, self._fetch, key)))
