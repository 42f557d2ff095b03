"""Plans which rank sends which box to which rank, by arithmetic without I/O, with the same result on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.checkpoint.ownership import ShardMap
from unisono.checkpoint.safetensors_format import Spec
from unisono.errors import StateMissing
from unisono.tensors.box import Box, slabs, without

GRAIN_BYTES = 4 << 20
"""The largest box of one move, so that several sources share the work of one large tensor."""
_Cells = list[tuple[Box, tuple[int, ...]]]
_Wanted = tuple[str, torch.dtype, Box, tuple[int, ...], int]
"""A box that each rank has completely or not at all: name, dtype, box, ranks that have it, rank that wants it."""


@dataclass(frozen=True)
class Move:
    """A box of a tensor that goes from rank `source` to rank `target`. The two are equal if the target has the box."""

    name: str
    dtype: torch.dtype
    box: Box
    source: int
    target: int

    @property
    def nbytes(self) -> int:
        """The number of bytes of the box's elements."""
        return self.box.numel * self.dtype.itemsize


def plan(
    here: Sequence[Sequence[ShardMap]],
    wants: Sequence[ShardMap],
    hosts: Sequence[str] = (),
    grain_bytes: int = GRAIN_BYTES,
) -> list[Move]:
    """Moves that bring every wanted element to the rank that wants it, exactly once.

    The source of an element is the target itself if it has the element, else a rank of the same host, else any rank.
    Among several, it is the rank that sends least so far; the largest boxes are assigned first (Graham 1969, LPT).

    Args:
        here: the shards of each rank, several sets of them if it has several boxes of a tensor; boxes may overlap.
        wants: the shards that each rank wants.
        hosts: the host of each rank; empty: all ranks are on one host.

    Raises:
        StateMissing: no rank has some boxes; the message names them.
    """
    cells = list(_wanted_cells(_holders(here), wants))
    missing = [(name, box) for name, _, box, owners, _ in cells if not owners]
    if missing:
        raise StateMissing(sorted({f"{name} {box} of {list(box.shape)}" for name, box in missing}))
    loads, hosts = [0] * len(wants), hosts or [""] * len(wants)
    moves = []
    for name, dtype, box, owners, target in sorted(cells, key=_largest_first):
        if target in owners:
            moves.append(Move(name, dtype, box, target, target))
            continue
        near = [rank for rank in owners if hosts[rank] == hosts[target]] or owners
        for part in slabs(box, max(1, grain_bytes // dtype.itemsize)):
            source = min(near, key=lambda rank: (loads[rank], rank))
            moves.append(Move(name, dtype, part, source, target))
            loads[source] += moves[-1].nbytes
    return moves


def rounds(moves: Iterable[Move], most_bytes: int) -> list[list[Move]]:
    """`moves` in rounds, in their order: in each, a source sends at most `most_bytes`, or a single box."""
    found: list[list[Move]] = []
    last: dict[int, tuple[int, int]] = {}  # by source: its last round, and the bytes that it sends in it
    for move in moves:
        number, nbytes = last.get(move.source, (0, 0))
        if nbytes and nbytes + move.nbytes > most_bytes:
            number, nbytes = number + 1, 0
        last[move.source] = number, nbytes + move.nbytes
        while len(found) <= number:
            found.append([])
        found[number].append(move)
    return found


def _largest_first(cell: _Wanted) -> tuple[Any, ...]:
    name, dtype, box, _, target = cell
    return -box.numel * dtype.itemsize, name, box, target


def _holders(here: Sequence[Sequence[ShardMap]]) -> dict[tuple[str, Spec], dict[Box, list[int]]]:
    """The ranks that have each box of a tensor. Tensors with one name but another dtype or shape are different."""
    found: dict[tuple[str, Spec], dict[Box, list[int]]] = {}
    for rank, holdings in enumerate(here):
        for held in holdings:
            for name, piece in held.items():
                owners = found.setdefault((name, piece.whole), {}).setdefault(piece.box, [])
                if rank not in owners:
                    owners.append(rank)
    return found


def _wanted_cells(
    holders: Mapping[tuple[str, Spec], Mapping[Box, Sequence[int]]], wants: Sequence[ShardMap]
) -> Iterator[_Wanted]:
    cut: dict[tuple[str, Spec, Box], _Cells] = {}  # ranks with equal shards want equal cells
    for target, wanted in enumerate(wants):
        for name, piece in wanted.items():
            key = name, piece.whole, piece.box
            if key not in cut:
                cut[key] = _cells(piece.box, holders.get(key[:2], {}))
            for box, owners in cut[key]:
                yield name, piece.dtype, box, owners, target


def _cells(wanted: Box, holders: Mapping[Box, Sequence[int]]) -> _Cells:
    cells: _Cells = [(wanted, ())] if wanted.numel else []
    for held in sorted(holders):
        divided: _Cells = []
        for box, owners in cells:
            common = box.overlap(held)
            if common is None:
                divided.append((box, owners))
                continue
            divided.append((common, tuple(sorted({*owners, *holders[held]}))))
            divided.extend((rest, owners) for rest in without(box, held))
        cells = divided
    return cells
