"""The mesh of a run's ranks under a layout: arithmetic without I/O.

The replica is the outermost dimension: the ranks of a replica are consecutive, and so are those of a tensor group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from unisono.errors import InvalidInput
from unisono.layout.layout import AXES, DATA_AXES, Layout


@dataclass(frozen=True)
class MeshCoordinate:
    """The coordinate of one rank: its replica, and its index on each axis of the layout."""

    replica: int
    pipeline: int
    replicate: int
    shard: int
    expert: int
    context: int
    tensor: int


@dataclass(frozen=True)
class RankMesh:
    """The arrangement of all workers of a run under one layout.

    Raises:
        InvalidInput: the workers of the run are not a multiple of those of a replica; names the nearest multiples.
    """

    layout: Layout
    workers: int

    def __post_init__(self) -> None:
        whole = self.layout.workers
        if self.workers % whole:
            fewer = self.workers // whole * whole
            nearest = f"--workers {fewer + whole}" if not fewer else f"--workers {fewer} or {fewer + whole}"
            raise InvalidInput(
                "layout", str(self.layout),
                f"one replica has {whole} workers, and the run's {self.workers} workers are not a multiple of that",
                f"write {nearest}" + (f", or {fitting}" if (fitting := self._fitting()) else ""))  # fmt: skip

    def _fitting(self) -> Layout | None:
        """The largest layout on the same axes, none of them longer, whose replicas divide the workers."""
        wide = [axis for axis in AXES if getattr(self.layout, axis) > 1]
        sizes = [[n for n in range(1, getattr(self.layout, axis) + 1) if self.workers % n == 0] for axis in wide]
        found = []
        for values in product(*sizes):
            changed: dict[str, Any] = {**dict(zip(wide, values)), "cuts": ()}
            with suppress(ValueError):  # an option of the layout may need an axis that is now 1
                found.append(replace(self.layout, **changed))
        fitting = [each for each in found if each.workers > 1 and self.workers % each.workers == 0]
        return max(fitting, key=lambda each: each.workers, default=None)

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.workers // self.layout.workers

    @property
    def shape(self) -> tuple[int, ...]:
        """Replicas, then the layout's axes from the outermost: the shape of a mesh of all ranks in order."""
        return (self.replicas, *(getattr(self.layout, axis) for axis in AXES))

    def of(self, rank: int) -> MeshCoordinate:
        """The coordinate of `rank`."""
        coordinates = []
        for size in reversed(self.shape):
            rank, at = divmod(rank, size)
            coordinates.append(at)
        return MeshCoordinate(*reversed(coordinates))

    def rank(self, place: MeshCoordinate) -> int:
        """The rank at the coordinate `place`."""
        found = 0
        for size, axis in zip(self.shape, ("replica", *AXES)):
            found = found * size + getattr(place, axis)
        return found

    def along(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only on these axes (``replica`` is one), including itself, in order."""
        fixed = [axis for axis in ("replica", *AXES) if axis not in axes]
        mine = [getattr(self.of(rank), axis) for axis in fixed]
        return tuple(
            other for other in range(self.workers) if mine == [getattr(self.of(other), axis) for axis in fixed]
        )

    @property
    def alike(self) -> list[tuple[int, ...]]:
        """For each position in a replica, the ranks at it in all replicas; they hold the same parts."""
        return [self.along(rank, "replica") for rank in range(self.layout.workers)]

    @property
    def data_parallel_size(self) -> int:
        """The number of different micro-batches that the run computes at the same time."""
        return self.replicas * self.layout.data_parallel_size

    def data_parallel_rank(self, rank: int) -> int:
        """Which of the `data_parallel_size` micro-batches the worker `rank` computes."""
        place = self.of(rank)
        found = place.replica
        for axis in DATA_AXES:
            found = found * getattr(self.layout, axis) + getattr(place, axis)
        return found

    def check_micro_batches(self, micro_batches: int) -> None:
        """Raise `InvalidInput` if a step's micro-batches cannot be divided equally over data-parallel ranks."""
        if self.layout.data_parallel_size > 1 and micro_batches % self.data_parallel_size:
            size = self.data_parallel_size
            fewer = max(size, micro_batches // size * size)
            raise InvalidInput(
                "layout", str(self.layout), f"{size} ranks compute different micro-batches and need equally many "
                f"each, but {micro_batches} per step do not divide by {size}",
                f"choose global_batch and micro_batch so that there are {fewer} or {fewer + size}")  # fmt: skip


def nearest_divisor(of: int, wanted: int) -> int:
    """The divisor of `of` nearest to `wanted` by ratio; of two equally near ones, the smaller."""
    divisors: Sequence[int] = [d for d in range(1, of + 1) if of % d == 0]
    return min(divisors, key=lambda d: (abs(math.log(d / wanted)), d))
