"""How large every worker's box of a distributed tensor is, from what one worker has of it: arithmetic on shapes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unisono.layout.rank_mesh import RankMesh


def local_shape(leaf: Tensor, places: RankMesh, rank: int) -> tuple[int, ...]:
    """The shape of the part of `leaf` that worker `rank` has, who stands where this one does but for axes over which
    it is spread; whichever worker's leaf it is."""
    found = list(leaf.shape)
    if not hasattr(leaf, "device_mesh"):
        return tuple(found)
    distributed: Any = leaf
    mesh, coordinate = distributed.device_mesh.mesh, distributed.device_mesh.get_coordinate()
    # What lies further in, the tensor axis, was divided first.
    for dim, placement in reversed(list(enumerate(distributed.placements))):
        along = getattr(placement, "dim", None)
        if along is not None:
            others = [slice(None) if i == dim else at for i, at in enumerate(coordinate)]
            members = mesh[tuple(others)].tolist()
            found[along] = chunk_size(found[along], len(members), _index_in(members, places, rank))
    return tuple(found)


def chunk_size(length: int, parts: int, part: int) -> int:
    """How much of `length` falls to `part` where torch cuts it into `parts`: the last may have less, or none."""
    each = -(-length // parts)
    return max(0, min(length - part * each, each))


def differing_axes(members: tuple[int, ...] | list[int], places: RankMesh) -> tuple[str, ...]:
    """On which axes these workers differ (``replica`` is one), the outermost first."""
    found = [vars(places.of(rank)) for rank in members]
    return tuple(axis for axis in found[0] if len({each[axis] for each in found}) > 1)


def _index_in(members: list[int], places: RankMesh, rank: int) -> int:
    """Which of the members stands where `rank` does on the axes on which they differ."""
    wide, here = differing_axes(members, places), places.of(rank)
    return next(i for i, member in enumerate(members)
                if all(getattr(places.of(member), axis) == getattr(here, axis) for axis in wide))  # fmt: skip
