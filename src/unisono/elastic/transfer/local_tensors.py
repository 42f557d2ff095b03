"""What a worker has in its memory of the global tensors, and how it says so."""

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
    """Tensors that lie here, by global name.

    Args:
        tensors: they are read only.
        boxes: which box of the global tensor each is; one without a box is the whole.
    """

    tensors: Mapping[str, Tensor]
    boxes: Mapping[str, Box] = field(default_factory=dict)

    @cached_property
    def shards(self) -> dict[str, TensorShard]:
        """The same without the numbers. Raises `ValueError` where a tensor has not the size of its box."""
        return shards_of(self.tensors, self.boxes)

    def part(self, name: str, dtype: torch.dtype, box: Box) -> Tensor | None:
        """The numbers of that box, where they are here."""
        piece = self.shards.get(name)
        if piece is None or piece.dtype != dtype or piece.box.shape != box.shape or piece.box.overlap(box) != box:
            return None
        return self.tensors[name].detach()[box.slices(piece.box)]


@dataclass(frozen=True)
class Inventory:
    """What one worker says to all: what it has, and what it wants."""

    here: Sequence[ShardMap]
    wants: ShardMap

    def encode(self) -> str:
        """As JSON."""
        return json.dumps([[encode_shards(each) for each in self.here], encode_shards(self.wants)])

    @staticmethod
    def decode(text: str) -> Inventory:
        """What `encode` wrote. Raises `ValueError` where it is anything else."""
        match json.loads(text):
            case [list(here), str(wants)] if all(isinstance(each, str) for each in here):
                return Inventory([decode_shards(each) for each in here], decode_shards(wants))
        raise ValueError("not what a worker says of its state")
