"""Who gives what to whom: arithmetic without I/O, the same on every worker for the same arguments."""

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
"""The most that is dealt out at once: several holders of one large tensor share the work."""
_Cells = list[tuple[Box, tuple[int, ...]]]
_Wanted = tuple[str, torch.dtype, Box, tuple[int, ...], int]
"""A box of a tensor of which each worker has all or nothing: name, dtype, box, who has it, who wants it."""


@dataclass(frozen=True)
class Move:
    """A box of a tensor, from the worker `source` to the worker `target`; who has it already gives it to itself."""

    name: str
    dtype: torch.dtype
    box: Box
    source: int
    target: int

    @property
    def nbytes(self) -> int:
        """Of the numbers."""
        return self.box.numel * self.dtype.itemsize


def plan(
    here: Sequence[Sequence[ShardMap]],
    wants: Sequence[ShardMap],
    hosts: Sequence[str] = (),
    grain_bytes: int = GRAIN_BYTES,
) -> list[Move]:
    """Moves that bring every wanted number to who wants it, exactly once.

    A number comes from who wants it where that has it, else from a worker of the same host where one has it; of those,
    from the one that gives least so far, largest boxes first (Graham 1969, LPT).

    Args:
        here: what each worker has, which may be several boxes of one tensor; of boxes that overlap, each is as good.
        wants: what each worker wants.
        hosts: where each worker is; empty: they are all alike.

    Raises:
        StateMissing: names what nobody has.
    """
    cells = list(_wanted_cells(_holders(here), wants))
    missing = [(name, box) for name, _, box, owners, _ in cells if not owners]
    if missing:
        raise StateMissing(sorted({f"{name} {box} of {list(box.shape)}" for name, box in missing}))
    loads, places = [0] * len(wants), hosts or [""] * len(wants)
    moves = []
    for name, dtype, box, owners, target in sorted(
        cells, key=lambda c: (-c[2].numel * c[1].itemsize, c[0], c[2], c[4])
    ):
        if target in owners:
            moves.append(Move(name, dtype, box, target, target))
            continue
        near = [rank for rank in owners if places[rank] == places[target]] or owners
        for part in slabs(box, max(1, grain_bytes // dtype.itemsize)):
            source = min(near, key=lambda rank: (loads[rank], rank))
            moves.append(Move(name, dtype, part, source, target))
            loads[source] += moves[-1].nbytes
    return moves


def rounds(moves: Iterable[Move], most_bytes: int) -> list[list[Move]]:
    """`moves` in the order in which they are made: in each round, a worker gives `most_bytes`, or one box."""
    found: list[list[Move]] = []
    given: dict[int, tuple[int, int]] = {}  # by source: the round in which it gives, and how much it gives there
    for move in moves:
        number, nbytes = given.get(move.source, (0, 0))
        if nbytes and nbytes + move.nbytes > most_bytes:
            number, nbytes = number + 1, 0
        given[move.source] = number, nbytes + move.nbytes
        while len(found) <= number:
            found.append([])
        found[number].append(move)
    return found


def _largest_first(cell: _Wanted) -> tuple[Any, ...]:
    name, dtype, box, _, target = cell
    return -box.numel * dtype.itemsize, name, box, target


def _holders(here: Sequence[Sequence[ShardMap]]) -> dict[tuple[str, Spec], dict[Box, list[int]]]:
    """Who has which boxes of a tensor; one of another dtype or shape is another tensor."""
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
    cut: dict[tuple[str, Spec, Box], _Cells] = {}  # equals want the same
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
