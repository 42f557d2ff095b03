"""Who stands where in a layout, and beside whom: arithmetic without I/O.

Ranks count the replicas last: a replica's workers are neighbours, and those of one tensor group most of all.
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
    """Where one worker stands: its replica, and its coordinate on each axis of the layout."""

    replica: int
    pipeline: int
    replicate: int
    shard: int
    expert: int
    context: int
    tensor: int


@dataclass(frozen=True)
class RankMesh:
    """All workers of a run under one layout.

    Raises:
        InvalidInput: the workers do not divide into whole replicas; names the nearest numbers that do.
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
                f"one replica lies on {whole} workers, and {self.workers} are not a multiple",
                f"write {nearest}" + (f", or {fitting}" if (fitting := self._fitting()) else ""))  # fmt: skip

    def _fitting(self) -> Layout | None:
        """The largest layout on the same axes, none of them longer, whose replicas these workers divide into."""
        wide = [axis for axis in AXES if getattr(self.layout, axis) > 1]
        sizes = [[n for n in range(1, getattr(self.layout, axis) + 1) if self.workers % n == 0] for axis in wide]
        found = []
        for values in product(*sizes):
            changed: dict[str, Any] = {**dict(zip(wide, values)), "cuts": ()}
            with suppress(ValueError):  # an option that asks for an axis
                found.append(replace(self.layout, **changed))
        fitting = [each for each in found if each.workers > 1 and self.workers % each.workers == 0]
        return max(fitting, key=lambda each: each.workers, default=None)

    @property
    def replicas(self) -> int:
        """How many there are."""
        return self.workers // self.layout.workers

    @property
    def shape(self) -> tuple[int, ...]:
        """Replicas, then the layout's axes from the outermost: the shape of a mesh of all ranks in their order."""
        return (self.replicas, *(getattr(self.layout, axis) for axis in AXES))

    def of(self, rank: int) -> MeshCoordinate:
        """Where `rank` stands."""
        coordinates = []
        for size in reversed(self.shape):
            rank, at = divmod(rank, size)
            coordinates.append(at)
        return MeshCoordinate(*reversed(coordinates))

    def rank(self, place: MeshCoordinate) -> int:
        """Who stands at `place`."""
        found = 0
        for size, axis in zip(self.shape, ("replica", *AXES)):
            found = found * size + getattr(place, axis)
        return found

    def along(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` on these axes only (``replica`` is one), itself among them, in order."""
        fixed = [axis for axis in ("replica", *AXES) if axis not in axes]
        mine = [getattr(self.of(rank), axis) for axis in fixed]
        return tuple(
            other for other in range(self.workers) if mine == [getattr(self.of(other), axis) for axis in fixed]
        )

    @property
    def alike(self) -> list[tuple[int, ...]]:
        """For each place of a replica, who stands there in all replicas: they hold the same."""
        return [self.along(rank, "replica") for rank in range(self.layout.workers)]

    @property
    def data_parallel_size(self) -> int:
        """Workers that compute different micro-batches at the same time."""
        return self.replicas * self.layout.data_parallel_size

    def data_parallel_rank(self, rank: int) -> int:
        """Which of the `lanes` worker `rank` belongs to."""
        place = self.of(rank)
        found = place.replica
        for axis in DATA_AXES:
            found = found * getattr(self.layout, axis) + getattr(place, axis)
        return found

    def check_micro_batches(self, micro_batches: int) -> None:
        """Raise `InvalidInput` if the workers side by side would not all compute as many of a step."""
        if self.layout.data_parallel_size > 1 and micro_batches % self.data_parallel_size:
            size = self.data_parallel_size
            fewer = max(size, micro_batches // size * size)
            raise InvalidInput(
                "layout", str(self.layout), f"{size} ranks compute different micro-batches and need equally many "
                f"each, but {micro_batches} per step do not divide by {size}",
                f"choose global_batch and micro_batch so that there are {fewer} or {fewer + size}")  # fmt: skip


def nearest_divisor(of: int, wanted: int) -> int:
    """The divisor of `of` that is nearest to `wanted`, the smaller of two."""
    divisors: Sequence[int] = [d for d in range(1, of + 1) if of % d == 0]
    return min(divisors, key=lambda d: (abs(math.log(d / wanted)), d))
