"""The size of any rank's part of a distributed tensor, from one rank's part: arithmetic on shapes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unisono.layout.rank_mesh import RankMesh


def local_shape(leaf: Tensor, places: RankMesh, rank: int) -> tuple[int, ...]:
    """The shape of the part of a distributed tensor that `rank` has.

    `leaf` is this tensor on any rank that differs from `rank` only on axes over which the tensor is sharded.
    """
    found = list(leaf.shape)
    if not hasattr(leaf, "device_mesh"):
        return tuple(found)
    distributed: Any = leaf
    mesh, coordinate = distributed.device_mesh.mesh, distributed.device_mesh.get_coordinate()
    # The innermost dimension, the tensor axis, was divided first.
    for dim, placement in reversed(list(enumerate(distributed.placements))):
        along = getattr(placement, "dim", None)
        if along is not None:
            others = [slice(None) if i == dim else at for i, at in enumerate(coordinate)]
            members = mesh[tuple(others)].tolist()
            found[along] = chunk_size(found[along], len(members), _index_in(members, places, rank))
    return tuple(found)


def chunk_size(length: int, parts: int, part: int) -> int:
    """The size of chunk `part` where torch divides `length` into `parts`: the last chunks may be smaller, or empty."""
    each = -(-length // parts)
    return max(0, min(length - part * each, each))


def differing_axes(members: tuple[int, ...] | list[int], places: RankMesh) -> tuple[str, ...]:
    """The axes on which these ranks differ (``replica`` is one), the outermost first."""
    found = [vars(places.of(rank)) for rank in members]
    return tuple(axis for axis in found[0] if len({each[axis] for each in found}) > 1)


def _index_in(members: list[int], places: RankMesh, rank: int) -> int:
    """The index among `members` of the rank that has the coordinates of `rank` on the axes on which they differ."""
    wide, here = differing_axes(members, places), places.of(rank)
    return next(i for i, member in enumerate(members)
                if all(getattr(places.of(member), axis) == getattr(here, axis) for axis in wide))  # fmt: skip
