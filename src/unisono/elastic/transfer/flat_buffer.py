"""Tensors as one run of bytes, which travels and lies in memory as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from unisono.checkpoint.ownership import ShardMap
from unisono.elastic.transfer.local_tensors import LocalTensors

_ALIGNMENT_BYTES = 16  # any dtype may begin there


def image_bytes(held: ShardMap) -> int:
    """The length of the image of tensors of these kinds."""
    return sum(_room(piece.spec.nbytes) for piece in held.values())


def write_image(held: LocalTensors, image: Tensor) -> None:
    """Copy the tensors into `image`, of as many bytes as `image_bytes` says."""
    for name, part in _parts(held.shards, image):
        part.copy_(held.tensors[name].detach())


def read_image(held: ShardMap, image: Tensor) -> LocalTensors:
    """The tensors that lie in `image`, and share its memory."""
    return LocalTensors(dict(_parts(held, image)), {name: piece.box for name, piece in held.items()})


def _parts(held: ShardMap, image: Tensor) -> Iterator[tuple[str, Tensor]]:
    begin = 0
    for name in sorted(held):
        spec = held[name].spec
        yield name, image[begin : begin + spec.nbytes].view(spec.dtype).view(spec.shape)
        begin += _room(spec.nbytes)


def _room(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def bytes_like(count: int, before: Tensor | None) -> Tensor:
    """Memory of `count` bytes; that of `before` where it is as large, whose pages are there already."""
    if before is not None and before.numel() == count:
        return before
    return torch.empty(count, dtype=torch.uint8)
