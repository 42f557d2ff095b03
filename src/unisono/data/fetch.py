"""Fetches the samples of one micro-batch from a map-style dataset, and collates them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from unisono.data.micro_batch_plan import MicroBatchPlan
from unisono.data.random_streams import seed_load, stream
from unisono.tensors.batch import Batch, tensors

Key = tuple[int, int]
"""A step, and a micro-batch of it."""

Fetched = tuple[Batch, float]
"""A batch, and the seconds that it took to fetch."""

ALL = -1  # in place of a sample's index: all samples of a micro-batch


class Fetch:
    """Fetches micro-batches. Random numbers that a dataset draws come from the stream of ``(seed, step, m)``.

    Attributes:
        on_sample: called with the index of each sample before it is fetched, and with `ALL` before operations on all
            samples of a micro-batch: collating, or fetching many at once.

    Tensor datasets, and subsets of them, with torch's default collate function are indexed in bulk, which gives the
    same batch.

    Args:
        collate: makes a batch of a list of samples. Default: torch's.
    """

    def __init__(
        self, dataset: Any, plan: MicroBatchPlan, collate: Callable[[list[Any]], Batch] | None, seed: int
    ) -> None:
        self._dataset, self._plan, self._seed = dataset, plan, seed
        self.on_sample: Callable[[int], None] = lambda sample: None
        self._collate = collate or default_collate
        self._tensors = plain_tensors(dataset) if self._collate is default_collate else None

    @property
    def bulk(self) -> bool:
        """Whether tensors are indexed in bulk. Then no code of the user runs, and no random numbers are drawn."""
        return self._tensors is not None

    def __call__(self, step: int, micro_batch: int) -> Batch:
        """The batch of `micro_batch` in `step`. Random numbers come from the generators of the process as they are.

        Raises:
            Exception: the dataset or `collate` raised it; a note names sample and micro-batch.
        """
        indices = self._plan.indices(step, micro_batch)
        if self._tensors is not None:
            rows = torch.from_numpy(indices)
            for subset in self._tensors[1]:
                rows = subset[rows]
            return [tensor[rows] for tensor in self._tensors[0]]
        with _noted(f"of step {step}, micro-batch {micro_batch}"):
            return self._collated(indices.tolist())

    def samples(self, step: int, micro_batch: int) -> list[int]:
        """The indices of the samples of a micro-batch."""
        return [int(index) for index in self._plan.indices(step, micro_batch)]

    def seeded(self, step: int, micro_batch: int) -> Batch:
        """As a call, with random numbers of the micro-batch's own stream; restores the generators of the process."""
        if self.bulk:
            return self(step, micro_batch)
        return self.fetch_and_detect(step, micro_batch)[0]

    def nonfinite_samples(self, step: int, micro_batch: int) -> list[int]:
        """Indices of the samples with a value that is not finite, in tensors with a row for each sample."""
        indices = self.samples(step, micro_batch)
        rows: set[int] = set()
        for tensor in tensors(self.seeded(step, micro_batch)):
            if tensor.is_floating_point() and tensor.dim() and len(tensor) == len(indices):
                rows |= set((~torch.isfinite(tensor)).view(len(indices), -1).any(1).nonzero().view(-1).tolist())
        return [indices[row] for row in sorted(rows)]

    def fetch_and_detect(self, step: int, micro_batch: int) -> tuple[Batch, bool]:
        """The batch that `seeded` returns, and whether the dataset drew random numbers."""
        before = _states()
        seed_load(stream(self._seed, step, micro_batch, "load"))
        try:
            with detect_rng_use() as rng_used:
                return self(step, micro_batch), rng_used()
        finally:
            _restore(before)

    def _collated(self, indices: list[int]) -> Batch:
        if hasattr(self._dataset, "__getitems__"):
            with _noted(f"one of the samples {', '.join(map(str, indices[:8]))}{', …' * (len(indices) > 8)}"):
                samples = self._dataset.__getitems__(indices)
        else:
            samples = [self._sample(index) for index in indices]
        self.on_sample(ALL)
        with _noted("while its samples were collated"):
            return self._collate(samples)

    def _sample(self, index: int) -> Any:
        self.on_sample(index)
        with _noted(f"sample {index}"):
            return self._dataset[index]


@contextmanager
def _noted(note: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def plain_tensors(dataset: Any) -> tuple[tuple[Tensor, ...], list[Tensor]] | None:
    """The tensors of a tensor dataset, and the row indices of each `Subset` around it, outermost first.

    None for any other dataset.
    """
    subsets: list[Tensor] = []
    while type(dataset) is Subset:
        subsets.append(torch.as_tensor(dataset.indices, dtype=torch.int64))
        dataset = dataset.dataset
    return (dataset.tensors, subsets) if type(dataset) is TensorDataset else None


@contextmanager
def detect_rng_use() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether torch, Python or numpy have drawn random numbers since."""
    before = _states()
    yield lambda: not _equal(before, _states())


_States = tuple[Tensor, object, dict[str, Any]]


def _states() -> _States:
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state(legacy=False)


def _equal(one: _States, other: _States) -> bool:
    keys = [(state["state"]["pos"], state["state"]["key"].tobytes(), state["gauss"]) for state in (one[2], other[2])]
    return torch.equal(one[0], other[0]) and one[1] == other[1] and keys[0] == keys[1]


def _restore(states: _States) -> None:
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])  # type: ignore[arg-type]
    np.random.set_state(states[2])


def timed(fetch: Callable[[int, int], Batch], key: Key) -> Fetched:
    """The batch of `key`, and the seconds that fetching it took."""
    began = time.perf_counter()
    return fetch(*key), time.perf_counter() - began
