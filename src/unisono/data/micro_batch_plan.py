"""The samples of every micro-batch, as a function of the seed and the step alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from unisono.data.permutation import Permutation
from unisono.errors import InvalidInput


@dataclass(frozen=True, init=False)
class MicroBatchPlan:
    """Which samples each micro-batch of each step has.

    Step *t* computes positions ``[t*B, (t+1)*B)`` of the seeded order, cut into micro-batches. Position *p* is the
    ``p % samples``-th sample of epoch ``p // samples``. Each epoch has another order and contains every sample once; a
    batch may span two epochs.

    Args:
        samples: the number of samples in the dataset.
        global_batch: the number of samples of one step, *B*.
        micro_batch: the number of samples of one pass. Default: the largest divisor of `global_batch` up to a quarter
            of it.
        seed: the seed of the order.

    Raises:
        InvalidInput: the dataset is empty or smaller than `global_batch`, or `micro_batch` does not divide
            `global_batch`.
    """

    samples: int
    global_batch: int
    micro_batch: int
    seed: int

    def __init__(self, samples: int, global_batch: int, micro_batch: int | None = None, seed: int = 0) -> None:
        _check_batch(samples, global_batch)
        chosen = default_micro_batch(global_batch) if micro_batch is None else micro_batch
        _check_micro_batch(global_batch, chosen)
        values = {"samples": samples, "global_batch": global_batch, "micro_batch": chosen, "seed": seed}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of one step."""
        return self.global_batch // self.micro_batch

    def positions(self, step: int, micro_batch: int) -> range:
        """The positions, counted from the start of the run, of micro-batch `micro_batch` of step `step`."""
        if step < 0 or not 0 <= micro_batch < self.micro_batches:
            raise ValueError(
                f"step {step}, micro-batch {micro_batch}: steps are from 0, micro-batches below {self.micro_batches}"
            )
        first = step * self.global_batch + micro_batch * self.micro_batch
        return range(first, first + self.micro_batch)

    def indices(self, step: int, micro_batch: int) -> NDArray[np.int64]:
        """The sample indices at these positions, shape ``[micro_batch]``."""
        positions = self.positions(step, micro_batch)
        epochs = range(positions[0] // self.samples, positions[-1] // self.samples + 1)
        return np.concatenate([self._of_epoch(epoch, positions) for epoch in epochs])

    def steps_in(self, epochs: float) -> int:
        """Whole steps in `epochs` passes over the data, at least 1."""
        return max(1, int(epochs * self.samples / self.global_batch + 1e-9))

    def left_out(self, epochs: float) -> str:
        """One sentence on samples that the whole steps in `epochs` do not reach; empty if there are none."""
        steps, wanted = self.steps_in(epochs), int(epochs * self.samples + 1e-9)
        used = steps * self.global_batch
        if used >= wanted:
            return ""
        return (
            f"epochs = {epochs:g}: the last {wanted - used} of {wanted} samples are not used, since {steps} steps of "
            f"{self.global_batch} samples take {used}; write steps = {steps + 1}, or choose a global_batch that "
            f"divides {wanted}"
        )

    def epoch_of(self, step: int) -> int:
        """The epoch in which `step` begins."""
        return step * self.global_batch // self.samples

    def _of_epoch(self, epoch: int, positions: range) -> NDArray[np.int64]:
        start = epoch * self.samples
        first, last = max(positions.start - start, 0), min(positions.stop - start, self.samples)
        if last - first >= _BLOCK:
            return _order(self.samples, self.seed, epoch)(np.arange(first, last))
        blocks = [_block(self.samples, self.seed, epoch, n) for n in range(first // _BLOCK, (last - 1) // _BLOCK + 1)]
        skipped = first % _BLOCK
        return (np.concatenate(blocks) if len(blocks) > 1 else blocks[0])[skipped : skipped + last - first]


_BLOCK = 1024
"""Positions that are computed together. The fixed cost of an array equals that of about 1,000 positions, so a block
pays off as soon as a worker computes two of the micro-batches in it."""


@lru_cache(maxsize=8)
def _block(samples: int, seed: int, epoch: int, number: int) -> NDArray[np.int64]:
    return _order(samples, seed, epoch)(np.arange(number * _BLOCK, min((number + 1) * _BLOCK, samples)))


@lru_cache(maxsize=4)
def _order(samples: int, seed: int, epoch: int) -> Permutation:
    return Permutation(samples, seed, epoch)


def default_micro_batch(global_batch: int) -> int:
    """The largest divisor of `global_batch` up to a quarter of it; 1 below 4."""
    return max(_divisors_up_to(global_batch, max(1, global_batch // 4)))


def _divisors_up_to(number: int, limit: int) -> list[int]:
    return [divisor for divisor in range(1, limit + 1) if number % divisor == 0]


def _check_batch(samples: int, global_batch: int) -> None:
    if samples < 1:
        raise InvalidInput("data", samples, "the dataset has no samples", "give it at least one global_batch of them")
    if global_batch < 1:
        raise InvalidInput("global_batch", global_batch, "below 1", f"use 1 to {samples}, the size of the dataset")
    if global_batch > samples:
        raise InvalidInput(
            "global_batch",
            global_batch,
            f"larger than the dataset, which has {samples} sample{'s' * (samples != 1)}",
            f"use at most {samples}, or more data",
        )


def _check_micro_batch(global_batch: int, micro_batch: int) -> None:
    if micro_batch >= 1 and global_batch % micro_batch == 0:
        return
    divisors = _divisors_up_to(global_batch, global_batch)
    below, above = [d for d in divisors if d < micro_batch], [d for d in divisors if d > micro_batch]
    nearest = " or ".join(str(d) for d in [*below[-1:], *above[:1]])
    larger = max(1, -(-global_batch // max(1, micro_batch))) * max(1, micro_batch)
    also = f", or global_batch={larger}" if micro_batch >= 1 else ""
    raise InvalidInput(
        "micro_batch",
        micro_batch,
        f"does not divide global_batch = {global_batch}" if micro_batch >= 1 else "below 1",
        f"use micro_batch={nearest}{also}",
    )
