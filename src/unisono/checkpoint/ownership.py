"""What each worker holds of the global tensors, and what of it each writes: arithmetic without I/O."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint.safetensors_format import DTYPES, Spec, dtype_name
from unisono.checkpoint.write_plan import plan_writes
from unisono.errors import CheckpointError
from unisono.tensors.box import Box, check_tiling


@dataclass(frozen=True)
class TensorShard:
    """A box of a global tensor that a worker holds, without its numbers."""

    dtype: torch.dtype
    box: Box

    @property
    def spec(self) -> Spec:
        """Of the local tensor that holds it."""
        return Spec(self.dtype, self.box.size)

    @property
    def whole(self) -> Spec:
        """Of the global tensor."""
        return Spec(self.dtype, self.box.shape)


ShardMap = Mapping[str, TensorShard]


def shards_of(tensors: Mapping[str, Tensor], boxes: Mapping[str, Box] | None = None) -> dict[str, TensorShard]:
    """What a worker with these local tensors holds, by global name.

    Args:
        boxes: which box of the global tensor each local one is; one without a box is the whole.

    Raises:
        ValueError: a tensor has not the size of its box, or a box has no tensor.
    """
    boxes = boxes or {}
    for name, box in boxes.items():
        if name not in tensors or tuple(tensors[name].shape) != box.size:
            found = list(tensors[name].shape) if name in tensors else "not there"
            raise ValueError(f"tensor {name!r} is {found}, and its box {box} of {list(box.shape)}")
    return {name: TensorShard(x.dtype, boxes.get(name) or Box.whole(x.shape)) for name, x in tensors.items()}


def encode_shards(held: ShardMap) -> str:
    """As JSON, to be told to the other workers."""
    boxes = {name: (piece, piece.box) for name, piece in held.items()}
    return json.dumps({name: [dtype_name(p.dtype), b.shape, b.offset, b.size] for name, (p, b) in boxes.items()})


def decode_shards(text: str) -> dict[str, TensorShard]:
    """What `encode_shards` wrote. Raises ValueError where it is anything else."""
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    return {name: _decode(name, piece) for name, piece in fields.items()}


def _decode(name: str, fields: Any) -> TensorShard:
    if isinstance(fields, list) and len(fields) == 4 and all(isinstance(numbers, list) for numbers in fields[1:]):
        dtype, *box = fields
        if dtype in DTYPES and all(type(n) is int for numbers in box for n in numbers):
            return TensorShard(DTYPES[dtype], Box(*map(tuple, box)))
    raise ValueError(f"tensor {name!r} has no possible dtype and box")


def write_plan(holders: Sequence[ShardMap]) -> list[dict[str, TensorShard]]:
    """What each worker writes, if worker *r* holds ``holders[r]``: together every tensor once, balanced by bytes.

    Every worker finds the same for the same `holders`, so nobody need be asked.

    Raises:
        CheckpointError: names a tensor, and the region of it, that nobody holds, that several hold in boxes which
            are not the same, or on whose dtype or shape workers do not agree.
    """
    found = _holders(holders)
    for name, boxes in found.items():
        try:
            check_tiling(next(iter(boxes)).shape, list(boxes))
        except ValueError as error:
            raise CheckpointError(f"tensor {name!r} cannot be written: {error}") from None
    dtypes = {name: piece.dtype for held in holders for name, piece in held.items()}
    who = {(name, box): ranks for name, boxes in found.items() for box, ranks in boxes.items()}
    sizes = {(name, box): box.numel * dtypes[name].itemsize for name, box in who}
    dealt = plan_writes(sizes, who, len(holders))
    return [{name: TensorShard(dtypes[name], box) for name, box in share if _is_something(box)} for share in dealt]


def _is_something(box: Box) -> bool:
    """Nothing of a tensor that has something need not be written."""
    return box.numel > 0 or math.prod(box.shape) == 0


def _holders(holders: Sequence[ShardMap]) -> dict[str, dict[Box, list[int]]]:
    """By name, every box of it and who holds that. An empty tensor has one box, the whole."""
    found: dict[str, dict[Box, list[int]]] = {}
    first: dict[str, Spec] = {}
    for rank, held in enumerate(holders):
        for name, piece in held.items():
            if first.setdefault(name, piece.whole) != piece.whole:
                raise CheckpointError(f"tensor {name!r} is {first[name]} to one worker and {piece.whole} to another")
            box = piece.box if math.prod(piece.box.shape) else Box.whole(piece.box.shape)
            found.setdefault(name, {}).setdefault(box, []).append(rank)
    return found
