"""Accumulators of the gradients that workers push for one slice, in the order of ranks or in the order of arrival."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Done = Callable[[], None]


class RoundAccumulator:
    """The sum of all workers' totals of one round, added in the order of ranks, for reproducible bits.

    A push for a later round discards the sum of the present round.
    """

    def __init__(self, workers: int, pieces: int) -> None:
        self._workers, self._pieces = workers, pieces
        self.round = self._next = 0
        self.used = [False] * pieces
        self._empty = True
        self._total: Tensor | None = None
        self._waiting: dict[int, tuple[Tensor | None, Done]] = {}

    @property
    def complete(self) -> bool:
        """Whether all workers have pushed for this round."""
        return self._next == self._workers

    @property
    def total(self) -> Tensor | None:
        """The sum; None if no worker pushed a gradient. The next round uses its memory again."""
        return None if self._empty else self._total

    def push(self, worker: int, round_: int, total: Tensor | None, used: Sequence[bool], done: Done) -> None:
        """Add the `total` of `worker`, which must not change until ``done()``. A repeated push is ignored."""
        if round_ > self.round:
            self._begin(round_)
        if round_ < self.round or worker < self._next or worker in self._waiting:
            done()
            return
        self._waiting[worker] = total, done
        self.used = [a or b for a, b in zip(self.used, used)]
        while self._next in self._waiting:
            self._add(*self._waiting.pop(self._next))
            self._next += 1

    def _begin(self, round_: int) -> None:
        discarded, self._waiting = self._waiting, {}
        self.round, self._next, self._empty = round_, 0, True
        self.used = [False] * self._pieces
        for _, done in discarded.values():
            done()

    def _add(self, total: Tensor | None, done: Done) -> None:
        if total is not None and self._empty:
            self._total = total.clone() if self._total is None else self._total.copy_(total)
            self._empty = False
        elif total is not None:
            assert self._total is not None
            self._total.add_(total)
        done()


class PushAccumulator:
    """The mean of the pushed gradients of one step, in the order of arrival.

    Args:
        needed: the number of micro-batches, or of pushes, that make a step.
        in_pushes: whether `needed` counts pushes.
        pieces: the number of pieces of the slice.
    """

    def __init__(self, needed: int, in_pushes: bool, pieces: int) -> None:
        self._needed, self._in_pushes, self._pieces = needed, in_pushes, pieces
        self._total: Tensor | None = None
        self._count = self._pushes = 0
        self._empty = True
        self.used = [False] * pieces

    @property
    def full(self) -> bool:
        """Whether the gradients for a step are complete."""
        return (self._pushes if self._in_pushes else self._count) >= self._needed

    def push(self, gradient: Tensor | None, count: int, used: Sequence[bool], scale: float = 1.0) -> None:
        """Add the mean gradient ``scale * gradient`` of `count` micro-batches; a `gradient` of None counts as zeros."""
        self._count, self._pushes = self._count + count, self._pushes + 1
        self.used = [a or b for a, b in zip(self.used, used)]
        if gradient is None:
            return
        if self._total is None:
            self._total = torch.empty_like(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        if self._empty:
            torch.mul(gradient, count * scale, out=self._total)
        else:
            self._total.add_(gradient, alpha=count * scale)
        self._empty = False

    def take(self) -> Tensor | None:
        """Return the mean, or None if all gradients were None, and begin the next step.

        The next push uses the memory of the mean again.
        """
        mean = None if self._empty or self._total is None else self._total.div_(self._count)
        self._reset()
        return mean

    def _reset(self) -> None:
        self._count = self._pushes = 0
        self._empty = True
        self.used = [False] * self._pieces
