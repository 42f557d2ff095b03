"""Plans how weights are divided into slices, and which server has each slice, without I/O.

    parameters, in the order of the forward pass    slices, sent in this order
    embed [50000, 64]                               0: embed[0:12500]       shard 0
                                                    1: embed[12500:25000]   shard 1 ...
    norm [64], bias [64], head [10, 64]             4: norm, bias, head     the least loaded shard

Matrices are divided between rows, so that the parts are matrices. Every worker computes the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.compress import Compressor, Span

SLICES_PER_SHARD = 4  # with fewer, shards cannot be balanced
SMALLEST_BYTES = 1 << 16  # slices are not made smaller to balance shards: the overhead of a message is some KB


@dataclass(frozen=True)
class SliceRows:
    """A piece of a slice: `rows` of one parameter (None: all rows), and their range in the slice, `span`."""

    rows: range | None
    span: Span

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of `tensor`, which has the shape of the parameter."""
        return tensor if self.rows is None else tensor[self.rows.start : self.rows.stop]


@dataclass(frozen=True)
class Slice:
    """One slice: pieces of one dtype, device and compressor, and the number of the shard that has them."""

    pieces: tuple[SliceRows, ...]
    dtype: torch.dtype
    device: torch.device
    compress: Compressor
    shard: int

    @property
    def spans(self) -> tuple[Span, ...]:
        """The ranges of the pieces."""
        return tuple(piece.span for piece in self.pieces)

    @property
    def numel(self) -> int:
        """The number of elements of the slice."""
        return self.pieces[-1].span.stop

    @property
    def nbytes(self) -> int:
        """The size of the slice's weights in bytes."""
        return self.numel * self.dtype.itemsize


def plan_slices(
    parameters: Mapping[str, nn.Parameter], compress: Compressor, slice_bytes: int, shards: int
) -> list[Slice]:
    """Divide `parameters`, which are in the order of the forward pass, into slices.

    A slice has at most `slice_bytes`, unless a single row is larger. Each slice goes to the shard with the fewest bytes
    so far.
    """
    total = sum(p.numel() * p.element_size() for p in parameters.values())
    balanced = max(SMALLEST_BYTES, -(-total // (SLICES_PER_SHARD * shards))) if shards > 1 else slice_bytes
    largest = min(slice_bytes, balanced)
    loads, slices = [0] * shards, []
    for kind, pieces in _packed(parameters, compress, largest):
        shard = loads.index(min(loads))
        slices.append(Slice(pieces, kind[1], kind[2], kind[0], shard))
        loads[shard] += slices[-1].nbytes
    return slices


_Kind = tuple[Compressor, torch.dtype, torch.device]


def _packed(
    parameters: Mapping[str, nn.Parameter], compress: Compressor, largest: int
) -> list[tuple[_Kind, tuple[SliceRows, ...]]]:
    """The kind and the pieces of each slice, of at most `largest` bytes, in the order of the slices' first pieces."""
    packed: list[tuple[_Kind, list[SliceRows]]] = []
    unfinished: dict[_Kind, list[SliceRows]] = {}
    for name, parameter in parameters.items():
        for rows in _rows(parameter, largest):
            like = torch.empty_like(parameter, device="meta")  # strides as autograd lays out a gradient
            part = like if rows is None else like[rows.start : rows.stop]
            kind = compress.choose(name, part.shape), parameter.dtype, parameter.device
            pieces = unfinished.get(kind)
            start = pieces[-1].span.stop if pieces else 0
            if pieces is None or (start + part.numel()) * part.element_size() > largest:
                pieces, start = [], 0
                unfinished[kind] = pieces
                packed.append((kind, pieces))
            pieces.append(SliceRows(rows, Span(name, part.shape, part.stride(), start, start + part.numel())))
    return [(kind, tuple(pieces)) for kind, pieces in packed]


def _rows(parameter: nn.Parameter, largest: int) -> Sequence[range | None]:
    """Ranges of about equally many rows, of at most `largest` bytes each.

    The only element is None, for all rows, if these fit or are not contiguous.
    """
    nbytes = parameter.numel() * parameter.element_size()
    stride = torch.empty_like(parameter, device="meta").stride()
    if nbytes <= largest or parameter.dim() == 0 or stride[0] < max(stride):
        return [None]
    count = len(parameter)
    parts = -(-count // max(1, largest * count // nbytes))
    return [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]
