"""The shards of global tensors in a worker's memory, and their description as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from unisono.checkpoint.ownership import ShardMap, TensorShard, decode_shards, encode_shards, shards_of
from unisono.tensors.box import Box


@dataclass(frozen=True)
class LocalTensors:
    """Local tensors by global name, and which boxes of the global tensors they are.

    Args:
        tensors: the local tensors, which are only read.
        boxes: the box of each tensor; a tensor without a box is whole.
    """

    tensors: Mapping[str, Tensor]
    boxes: Mapping[str, Box] = field(default_factory=dict)

    @cached_property
    def shards(self) -> dict[str, TensorShard]:
        """The shards without their elements. Raises `ValueError` if a tensor differs in size from its box."""
        return shards_of(self.tensors, self.boxes)

    def view(self, name: str, dtype: torch.dtype, box: Box) -> Tensor | None:
        """A view of `box`, if it is inside the local shard; else None."""
        shard = self.shards.get(name)
        if shard is None or shard.dtype != dtype or shard.box.shape != box.shape or shard.box.overlap(box) != box:
            return None
        return self.tensors[name].detach()[box.slices(shard.box)]


@dataclass(frozen=True)
class Inventory:
    """Which shards one rank has (`here`), and which it wants."""

    here: Sequence[ShardMap]
    wants: ShardMap

    def encode(self) -> str:
        """The inventory as JSON text."""
        return json.dumps([[encode_shards(shards) for shards in self.here], encode_shards(self.wants)])

    @staticmethod
    def decode(text: str) -> Inventory:
        """The inverse of `encode`. Raises `ValueError` for any other text."""
        match json.loads(text):
            case [list(here), str(wants)] if all(isinstance(text, str) for text in here):
                return Inventory([decode_shards(text) for text in here], decode_shards(wants))
        raise ValueError("not an inventory of shards")
