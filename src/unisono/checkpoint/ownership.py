"""Which rank holds which shards, and which of them it writes: arithmetic without I/O."""

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
    """The dtype and box of a shard of a global tensor."""

    dtype: torch.dtype
    box: Box

    @property
    def spec(self) -> Spec:
        """Dtype and shape of the local tensor."""
        return Spec(self.dtype, self.box.size)

    @property
    def whole(self) -> Spec:
        """Dtype and shape of the global tensor."""
        return Spec(self.dtype, self.box.shape)


ShardMap = Mapping[str, TensorShard]


def shards_of(tensors: Mapping[str, Tensor], boxes: Mapping[str, Box] | None = None) -> dict[str, TensorShard]:
    """The dtype and box of each of `tensors`, by global name.

    Args:
        boxes: for each tensor that is a shard, by name, its box; a tensor without a box is whole.

    Raises:
        ValueError: a tensor differs in size from its box, or a box has no tensor.
    """
    boxes = boxes or {}
    for name, box in boxes.items():
        if name not in tensors or tuple(tensors[name].shape) != box.size:
            found = list(tensors[name].shape) if name in tensors else "missing"
            size = f"its box {box} of {list(box.shape)} has size {list(box.size)}"
            raise ValueError(f"tensor {name!r} is {found}, but {size}")
    return {name: TensorShard(x.dtype, boxes.get(name) or Box.whole(x.shape)) for name, x in tensors.items()}


def encode_shards(shards: ShardMap) -> str:
    """`shards` as JSON, to be sent to other ranks."""
    boxes = {name: (shard, shard.box) for name, shard in shards.items()}
    return json.dumps({name: [dtype_name(p.dtype), b.shape, b.offset, b.size] for name, (p, b) in boxes.items()})


def decode_shards(text: str) -> dict[str, TensorShard]:
    """Inverse of `encode_shards`. Raises ValueError for any other text."""
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    return {name: _decode(name, shard) for name, shard in fields.items()}


def _decode(name: str, fields: Any) -> TensorShard:
    if isinstance(fields, list) and len(fields) == 4 and all(isinstance(numbers, list) for numbers in fields[1:]):
        dtype, *box = fields
        if dtype in DTYPES and all(type(n) is int for numbers in box for n in numbers):
            return TensorShard(DTYPES[dtype], Box(*map(tuple, box)))
    raise ValueError(f"tensor {name!r} has no possible dtype and box")


def write_plan(holders: Sequence[ShardMap]) -> list[dict[str, TensorShard]]:
    """The shards that each rank writes, if rank *r* holds ``holders[r]``: every tensor once, balanced by bytes.

    The result is equal on all ranks for equal `holders`, so they need not communicate.

    Raises:
        CheckpointError: no rank holds a region of a tensor, boxes of several ranks overlap without being equal, or
            ranks disagree on a dtype or shape; names the tensor and the region.
    """
    ranks_of = _holders(holders)
    for name, boxes in ranks_of.items():
        try:
            check_tiling(next(iter(boxes)).shape, list(boxes))
        except ValueError as error:
            raise CheckpointError(f"tensor {name!r} cannot be written: {error}") from None
    dtypes = {name: shard.dtype for shards in holders for name, shard in shards.items()}
    owners = {(name, box): ranks for name, boxes in ranks_of.items() for box, ranks in boxes.items()}
    sizes = {(name, box): box.numel * dtypes[name].itemsize for name, box in owners}
    plan = plan_writes(sizes, owners, len(holders))
    return [{name: TensorShard(dtypes[name], box) for name, box in items if _is_written(box)} for items in plan]


def _is_written(box: Box) -> bool:
    """Whether the box is written: not if it is an empty box of a tensor that is not empty."""
    return box.numel > 0 or math.prod(box.shape) == 0


def _holders(holders: Sequence[ShardMap]) -> dict[str, dict[Box, list[int]]]:
    """For each tensor, by name, the ranks that hold each of its boxes. An empty tensor has one box, the whole."""
    found: dict[str, dict[Box, list[int]]] = {}
    first: dict[str, Spec] = {}
    for rank, shards in enumerate(holders):
        for name, shard in shards.items():
            if first.setdefault(name, shard.whole) != shard.whole:
                raise CheckpointError(f"tensor {name!r} is {first[name]} on one worker and {shard.whole} on another")
            box = shard.box if math.prod(shard.box.shape) else Box.whole(shard.box.shape)
            found.setdefault(name, {}).setdefault(box, []).append(rank)
    return found
