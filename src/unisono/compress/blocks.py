"""What travels as small whole numbers with a scale per block: the frame of `Quantize`, `OneBit` and `TwoBit`.

    message   ┌ scale of block 0, 1, ... (bf16) ┬ codes of block 0, 1, ... ┐   uint8
              └─────────────────────────────────┴──────────────────────────┘
    arrives   level * scale, where level = lowest + step * code

Blocks are worked through in pieces that stay in a core's cache from the first pass over them to the last, and what is
left out is a by-product of the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.compress.compressor import Codec
from unisono.compress.dither import Dither
from unisono.compress.memory import Memory
from unisono.compress.packing import pack, packed, unpack
from unisono.compress.span import Span

_PIECE = 1 << 16  # numbers: 256 KiB of fp32, a fraction of a core's second-level cache
_SCALE = torch.bfloat16  # the range of fp32, so that no block is too small or too large for it


class Blocks(Codec):
    """A subclass gives `code_bits`, `scales` and `levels`, and the other figures where they differ.

    Args:
        block: numbers that share a scale; the last block may be shorter.
    """

    block: int
    scaled = True  # whether scales travel
    step = 1  # from one level to the next

    @property
    def code_bits(self) -> int:
        """Bits of one code: 1, 2, 4 or 8."""
        raise NotImplementedError

    @property
    def lowest(self) -> int:
        """The level of code 0."""
        return -(1 << (self.code_bits - 1))

    def scales(self, x: Tensor, scratch: Tensor) -> Tensor:
        """One scale per row of `x` (fp32 of shape ``[blocks, block]``): ``[blocks, 1]``. `scratch` is like `x`."""
        raise NotImplementedError

    def levels(self, x: Tensor, scales: Tensor, dither: Tensor | None, out: Tensor) -> None:
        """Write the whole number that each number of `x` becomes into `out`, which is like `x`."""
        raise NotImplementedError

    def values(self, levels: Tensor, scales: Tensor) -> None:
        """Turn `levels` into what arrives, in place."""
        levels.mul_(scales)

    def dither(self, total: Tensor, memory: Memory) -> Dither | None:
        """What is added before rounding down, or None where rounding is to nearest."""
        return None

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(self._head(numel) + packed(numel, self.code_bits), dtype=torch.uint8, device=device)

    def encode(self, total: Tensor, spans: Sequence[Span], memory: Memory) -> Tensor:
        return self._send(total, None, None, self.dither(total, memory))

    def owe(self, total: Tensor, spans: Sequence[Span], memory: Memory) -> Tensor:
        left = memory.spare("owed")
        if left is None:
            left = torch.empty_like(total)
        message = self._send(total, memory.get("owed"), left, self.dither(total, memory))
        memory.put("owed", left)
        return message

    def decode(self, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
        codes, scales = self._fields(message, numel)
        out = torch.empty(numel, dtype=dtype, device=message.device)
        scratch = _Scratch(numel, self.block, message.device)
        for piece in _pieces(numel, self.block):
            target = out[piece.start : piece.stop].view(piece.shape)
            levels = target if dtype == torch.float32 else scratch.floats(piece)
            self._unpack(codes, piece, scratch, levels)
            self.values(levels, self._scales_of(scales, piece))
            if levels is not target:
                target.copy_(levels)
        return out

    def _send(self, total: Tensor, owed: Tensor | None, left: Tensor | None, dither: Dither | None) -> Tensor:
        """The message for ``total + owed``, which `total` becomes; what it leaves out goes to `left`."""
        numel = total.numel()
        message = self.blank((), numel, total.dtype, total.device)
        codes, scales = self._fields(message, numel)
        scratch = _Scratch(numel, self.block, total.device)
        for piece in _pieces(numel, self.block):
            here = slice(piece.start, piece.stop)
            part = total[here] if owed is None else total[here].add_(owed[here])
            x, levels = part.float().view(piece.shape), scratch.floats(piece)
            scale = self.scales(x, levels).to(_SCALE)
            if self.scaled:
                scales[piece.row : piece.row + piece.shape[0]] = scale.squeeze(1)
            scale = scale.float()
            self.levels(x, scale, dither.of(piece.start, x) if dither else None, levels)
            self._pack(levels.view(-1), piece, scratch, codes)
            if left is not None:
                torch.addcmul(x, levels, scale, value=-1, out=levels)
                left[here] = levels.view(-1)
        return message

    def _head(self, numel: int) -> int:
        """Bytes of the scales."""
        return -(-numel // self.block) * _SCALE.itemsize if self.scaled else 0

    def _fields(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        head, length = self._head(numel), self._head(numel) + packed(numel, self.code_bits)
        if message.dtype != torch.uint8 or message.shape != (length,):
            got = f"{tuple(message.shape)} of {message.dtype}"
            raise ValueError(f"{self!r} sends {numel} numbers as {length} bytes (uint8), not as {got}")
        return message[head:], message[:head].view(_SCALE)

    def _scales_of(self, scales: Tensor, piece: _Piece) -> Tensor:
        return scales[piece.row : piece.row + piece.shape[0]].float().unsqueeze(1)

    def _pack(self, levels: Tensor, piece: _Piece, scratch: _Scratch, codes: Tensor) -> None:
        bits = self.code_bits
        target = codes[piece.start * bits // 8 :][: packed(levels.numel(), bits)]
        if bits == 8:
            target.view(torch.int8).copy_(levels)
            return
        whole = scratch.bytes[: target.numel() * 8 // bits]
        whole[levels.numel() :].zero_()
        signed = whole[: levels.numel()].view(torch.int8)
        signed.copy_(levels).sub_(self.lowest)
        pack(whole if self.step == 1 else whole.bitwise_right_shift_(1), bits, target)

    def _unpack(self, codes: Tensor, piece: _Piece, scratch: _Scratch, levels: Tensor) -> None:
        bits, numel = self.code_bits, levels.numel()
        source = codes[piece.start * bits // 8 :][: packed(numel, bits)]
        if bits == 8:
            levels.view(-1).copy_(source.view(torch.int8))
            return
        whole = scratch.bytes[: source.numel() * 8 // bits]
        unpack(source, bits, whole)
        signed = (whole if self.step == 1 else whole.bitwise_left_shift_(1)).view(torch.int8)
        levels.view(-1).copy_(signed.add_(self.lowest)[:numel])


def check_block(block: object) -> None:
    """
    Raises:
        ValueError: not a multiple of 8 from 8 to 65536.
    """
    if not isinstance(block, int) or not 8 <= block <= _PIECE or block % 8:
        raise ValueError(f"block={block!r} is not a multiple of 8 from 8 to {_PIECE}")


@dataclass(frozen=True)
class _Piece:
    """Numbers ``[start, stop)``, which are blocks ``row, row + 1, ...`` of shape ``[blocks, numbers]``."""

    start: int
    stop: int
    row: int
    shape: tuple[int, int]


def _pieces(numel: int, block: int) -> Iterator[_Piece]:
    """Whole blocks, as many as fit into a cache at a time, then the rest of a block."""
    whole, rest = divmod(numel, block)
    together = max(1, _PIECE // block)
    for row in range(0, whole, together):
        rows = min(together, whole - row)
        yield _Piece(row * block, (row + rows) * block, row, (rows, block))
    if rest:
        yield _Piece(numel - rest, numel, whole, (1, rest))


class _Scratch:
    """Memory for one piece, taken once for a message."""

    def __init__(self, numel: int, block: int, device: torch.device) -> None:
        most = min(-(-numel // 8) * 8, max(_PIECE, block))
        self._floats = torch.empty(most, device=device)
        self.bytes = torch.empty(most, dtype=torch.uint8, device=device)

    def floats(self, piece: _Piece) -> Tensor:
        """Of the piece's shape."""
        return self._floats[: piece.stop - piece.start].view(piece.shape)
