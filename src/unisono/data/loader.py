"""Loads the micro-batches of one worker in advance."""

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

INLINE_BELOW_BYTES = 1 << 20  # copying so many bytes of tensors in memory is faster than a switch of threads
INLINE_BELOW_SECONDS = 300e-6
"""Batches that are fetched faster are not fetched in advance; a switch of threads takes about a tenth of this."""

WorkItem = tuple[int, range, Iterator[tuple[int, Batch]]]
"""A step, the micro-batches of it that one worker computes, and their numbers and batches."""

_log = logging.getLogger(__name__)


class Loader:
    """Loads this worker's micro-batches of a range of steps.

    Construct it before anything of ``torch.distributed``, since `Processes` forks. Batches are equal for every `load`
    and any number of workers.

    Attributes:
        ahead_seconds: total time of fetching, in advance, the batches returned so far, divided by the number of
            loading processes. Excludes batches that were fetched when needed.

    Args:
        dataset: a map-style dataset; ``__getitems__`` is used where it exists.
        plan: which samples each micro-batch has.
        mine: returns this worker's micro-batches of a step.
        collate: makes a batch of a list of samples. Default: torch's.
        load: how samples are fetched. None: the loader fetches the first micro-batch and chooses. It takes `Inline` if
            the dataset drew random numbers or took less than 300 us, else `Threads`.
        seed: the seed of the random numbers that the dataset draws.
        steps: the consecutive steps that are fetched in advance.
        notice: called with one sentence for each loading process that exited and was replaced.

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
        steps: range = range(0),
        notice: Callable[[str], None] = _log.warning,
    ) -> None:
        self._mine, self._notice = mine, notice
        self._fetch = Fetch(dataset, plan, collate, seed)
        keys = ((step, m) for step in steps for m in mine(step))
        self._probed: dict[Key, Batch] = {}
        self.ahead_seconds = 0.0
        if isinstance(load, Threads) or load is None:
            load = self._probe(next(keys, None), load)
        self.load: Load = load
        self._source = _source(load, self._fetch, keys, notice)

    def batches(self, step: int) -> Iterator[tuple[int, Batch]]:
        """This worker's micro-batches of `step` and their numbers, in order. A step may be requested again.

        Raises:
            Exception: the dataset raised it; a note names sample and micro-batch.
            LoadingFailed: two processes exited on the same sample.
        """
        return self._all(step, self._mine(step))

    def nonfinite_samples(self, step: int, micro_batch: int) -> list[int]:
        """Indices of the samples in `micro_batch`, of any worker, with a value that is not finite.

        Empty if tensors of the batch have no row for each sample.
        """
        return self._fetch.nonfinite_samples(step, micro_batch)

    def work_items(self, leases: Iterable[tuple[int, range]]) -> Iterator[WorkItem]:
        """The steps and micro-batches in `leases`, one work item after the other, with their batches.

        `leases` is advanced as far ahead as batches are fetched.

        Raises:
            Exception: the dataset raised it; a note names sample and micro-batch.
        """
        leased: deque[tuple[int, range]] = deque()

        def keys() -> Iterator[Key]:
            for step, micro_batches in leases:
                leased.append((step, micro_batches))
                yield from ((step, m) for m in micro_batches)

        self._source.close()
        if isinstance(self.load, Inline):
            items: Iterator[tuple[int, range]] = iter(leases)
        else:
            self._source = _source(self.load, self._fetch, keys(), self._notice)
            items = iter(lambda: leased.popleft() if leased else None, None)
        for step, micro_batches in items:
            yield step, micro_batches, self._all(step, micro_batches)

    def stacks(self) -> list[str]:
        """Stack traces of the loading processes, see `LoaderStacks.collect`; for any thread."""
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
            self._source.take()  # skip batches of a step that was left out
        if self._source.next != key:
            return self._fetch.seeded(step, micro_batch)
        batch, seconds = self._source.take()
        self.ahead_seconds += seconds
        return batch

    def _probe(self, key: Key | None, load: Threads | None) -> Load:
        """Fetch `key` in this thread, and choose how to load by what that took."""
        if key is None:
            return load or Inline()
        began = time.perf_counter()
        self._probed[key], rng_used = (
            (self._fetch(*key), False) if self._fetch.bulk else self._fetch.fetch_and_detect(*key)
        )
        seconds = time.perf_counter() - began
        if rng_used and load:
            problem = "the dataset draws random numbers, and a thread would share its generators with the training"
            raise InvalidInput("load", load, problem, "use Processes() or Inline()")
        if rng_used:
            _log.warning("the dataset draws random numbers: it is loaded inline; load=Processes() loads it ahead")
        # The first fetch includes one-time costs, so its duration is no measure for tensors in memory.
        small = self._fetch.bulk and sum(t.nbytes for t in self._probed[key]) < INLINE_BELOW_BYTES
        return load or (Inline() if rng_used or small or seconds < INLINE_BELOW_SECONDS else Threads())


class _BatchSource(Protocol):
    """Batches in a fixed order, fetched in advance.

    `take` returns the next batch and the seconds that it took to fetch; `next` is the key of that batch.
    """

    @property
    def next(self) -> Key | None: ...
    def stacks(self) -> list[str]: ...
    def take(self) -> Fetched: ...
    def close(self) -> None: ...


def _source(load: Load, fetch: Fetch, keys: Iterator[Key], notice: Callable[[str], None]) -> _BatchSource:
    if isinstance(load, Threads):
        return _ThreadSource(fetch, keys, load.ahead)
    if isinstance(load, Processes):
        return LoadingProcesses(fetch, keys, load, notice)
    return _NoSource()


class _NoSource:
    """Fetches nothing in advance."""

    next: Key | None = None

    def take(self) -> Fetched:
        raise LookupError("nothing is fetched in advance")

    def stacks(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class _ThreadSource:
    """Fetches in one background thread; has the futures of the next micro-batches, in order."""

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
        return []  # its thread belongs to this process

    def close(self) -> None:
        self._futures.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> None:
        for key in islice(self._keys, 1):
            self._futures.append((key, self._pool.submit(timed, self._fetch, key)))
