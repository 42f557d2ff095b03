"""Packs tensors into one contiguous buffer of bytes, to be sent and stored as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from unisono.checkpoint.ownership import ShardMap
from unisono.elastic.transfer.local_tensors import LocalTensors

ALIGNMENT_BYTES = 16  # tensors of every dtype may begin at a multiple of this


def image_bytes(shards: ShardMap) -> int:
    """The length in bytes of the buffer for these shards."""
    return sum(aligned(shard.spec.nbytes) for shard in shards.values())


def write_image(local: LocalTensors, image: Tensor) -> None:
    """Copy the tensors into `image`, a buffer of `image_bytes` bytes."""
    for name, view in _views(local.shards, image):
        view.copy_(local.tensors[name].detach())


def read_image(shards: ShardMap, image: Tensor) -> LocalTensors:
    """The tensors with these shards in `image`, as views."""
    return LocalTensors(dict(_views(shards, image)), {name: shard.box for name, shard in shards.items()})


def _views(shards: ShardMap, image: Tensor) -> Iterator[tuple[str, Tensor]]:
    begin = 0
    for name in sorted(shards):
        spec = shards[name].spec
        yield name, image[begin : begin + spec.nbytes].view(spec.dtype).view(spec.shape)
        begin += aligned(spec.nbytes)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up, so that a tensor of any dtype may follow."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def reuse_or_allocate(count: int, old: Tensor | None) -> Tensor:
    """A buffer of `count` bytes: `old`, whose pages are already mapped, if it has that size; else a new one."""
    if old is not None and old.numel() == count:
        return old
    return torch.empty(count, dtype=torch.uint8)
