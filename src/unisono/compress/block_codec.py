"""Messages of small whole numbers with one scale per block: the base of `Quantize`, `OneBit` and `TwoBit`.

    message   ┌ scale of block 0, 1, ... (bf16) ┬ codes of block 0, 1, ... ┐   uint8
              └─────────────────────────────────┴──────────────────────────┘
    decoded   level * scale, where level = lowest + step * code

Blocks are processed in pieces that stay in a core's cache over all passes; the last pass also computes the residual.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

import torch
from torch import Tensor

from unisono.compress.bit_packing import pack, packed, unpack
from unisono.compress.compressor import Codec
from unisono.compress.dither import PERIOD, Dither
from unisono.compress.memory import RESIDUAL, CompressorMemory
from unisono.compress.span import Span

_PIECE = PERIOD  # numbers: 512 KiB of fp32, for a core's second-level cache; with fewer, call overhead dominates
_ALIGN = 8  # bytes: rows of a gather are contiguous
SCALE = torch.bfloat16  # has the range of fp32, so it can represent the scale of any block


class BlockCodec(Codec):
    """Base of block-wise codecs. A subclass defines `code_bits`, `scales` and `levels`, and overrides other defaults.

    Args:
        block: how many numbers share a scale; the last block may be shorter.
    """

    block: int

    @property
    def code_bits(self) -> int:
        """The number of bits of one code: 1, 2, 4 or 8."""
        raise NotImplementedError

    @property
    def step(self) -> int:
        """The difference of adjacent levels: 1 or 2."""
        return 1

    @property
    def lowest(self) -> int:
        """The level of code 0."""
        return -(1 << (self.code_bits - 1))

    @property
    def scaled(self) -> bool:
        """Whether a message contains scales."""
        return True

    def scales(self, x: Tensor, scratch: Tensor) -> Tensor:
        """One scale per row of `x` (fp32, ``[blocks, block]``): ``[blocks, 1]``, in bf16 if messages contain them.

        `scratch` has the shape of `x` and may be overwritten.
        """
        raise NotImplementedError

    def levels(self, x: Tensor, scales: Tensor, dither: Tensor | None, out: Tensor) -> None:
        """Write the level of each number of `x` into `out`, of the shape of `x`."""
        raise NotImplementedError

    def values(self, levels: Tensor, scales: Tensor) -> None:
        """Replace `levels` in place by the numbers that they represent."""
        levels.mul_(scales)

    def dither(self, total: Tensor, memory: CompressorMemory) -> Dither | None:
        """The random numbers that are added before rounding down; None: rounding is to nearest."""
        return None

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)  # residuals would be lost by rounding in a 16-bit sum

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(self._length(numel), dtype=torch.uint8, device=device)

    def encode(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        return self._send(total, None, None, self.dither(total, memory))

    def encode_with_feedback(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        residual = memory.spare(RESIDUAL)
        if residual is None:
            residual = torch.empty(total.numel(), dtype=total.dtype, device=total.device)
        message = self._send(total, memory.get(RESIDUAL), residual, self.dither(total, memory))
        memory.put(RESIDUAL, residual)
        return message

    def decode(self, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
        if message.dtype != torch.uint8 or message.shape != (self._length(numel),):
            got = f"{tuple(message.shape)} of {message.dtype}"
            raise ValueError(f"{self!r} sends {numel} numbers as {self._length(numel)} bytes, not as {got}")
        out = torch.empty(numel, dtype=dtype, device=message.device)
        scratch = _Scratch(numel, self.block, message.device)
        for target, codes, scale in zip(_pieces(out, self.block), *self._fields(message, numel)):
            levels = target if dtype == torch.float32 else scratch.floats(target)
            self._unpack(codes, scratch, levels.view(-1))
            self.values(levels, scale.float())
            if levels is not target:
                target.copy_(levels)
        return out

    def _send(self, total: Tensor, old: Tensor | None, new: Tensor | None, dither: Dither | None) -> Tensor:
        """The message for ``total + old`` residual, which `total` becomes; the new residual is written into `new`."""
        numel, start = total.numel(), 0
        message = self.blank((), numel, total.dtype, total.device)
        message[-_ALIGN:].zero_()  # padding must not depend on uninitialized memory
        scratch = _Scratch(numel, self.block, total.device)
        residuals, remainders = _pieces_or_none(old, self.block), _pieces_or_none(new, self.block)
        parts = _pieces(total, self.block)
        for part, residual, remainder, codes, scale in zip(parts, residuals, remainders, *self._fields(message, numel)):
            x = (part if residual is None else part.add_(residual)).float()
            levels = scratch.floats(x)
            scales = self.scales(x, levels)
            if self.scaled:
                scale.copy_(scales)
            scales = scales.float()
            self.levels(x, scales, dither.of(start, x) if dither else None, levels)
            self._pack(levels.view(-1), scratch, codes)
            if remainder is not None:
                target = remainder if remainder.dtype == torch.float32 else levels
                torch.addcmul(x, levels, scales, value=-1, out=target)
                if target is not remainder:
                    remainder.copy_(target)
            start += x.numel()
        return message

    def _head(self, numel: int) -> int:
        """The number of bytes of the scales."""
        return -(-numel // self.block) * SCALE.itemsize if self.scaled else 0

    def _length(self, numel: int) -> int:
        """The number of bytes of a message."""
        return -(-(self._head(numel) + packed(numel, self.code_bits)) // _ALIGN) * _ALIGN

    def _fields(self, message: Tensor, numel: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The codes of each piece, and the scales of each piece as a column."""
        shapes = _shapes(numel, self.block)
        head, end = self._head(numel), self._head(numel) + packed(numel, self.code_bits)
        codes = message[head:end].split([packed(rows * columns, self.code_bits) for rows, columns in shapes])
        if not self.scaled:
            return codes, [message[:0]] * len(shapes)
        scales = (message[:head] if message.storage_offset() % 2 == 0 else message[:head].clone()).view(SCALE)
        return codes, scales.unsqueeze(1).split([rows for rows, _ in shapes])

    def _pack(self, levels: Tensor, scratch: _Scratch, codes: Tensor) -> None:
        bits = self.code_bits
        if bits == 8:
            codes.view(torch.int8).copy_(levels)
            return
        whole = scratch.bytes[: codes.numel() * 8 // bits]
        whole[levels.numel() :].zero_()
        whole[: levels.numel()].view(torch.int8).copy_(levels)
        whole.sub_(self.lowest % 256)
        if self.step == 2:
            whole.bitwise_right_shift_(1)
        pack(whole.bitwise_and_((1 << bits) - 1), bits, codes)  # NaN becomes any code, without effect on its neighbours

    def _unpack(self, codes: Tensor, scratch: _Scratch, levels: Tensor) -> None:
        bits = self.code_bits
        if bits == 8:
            levels.copy_(codes.view(torch.int8))
            return
        whole = scratch.bytes[: codes.numel() * 8 // bits]
        unpack(codes, bits, whole)
        if self.step == 2:
            whole.mul_(2)
        levels.copy_(whole.view(torch.int8).add_(self.lowest)[: levels.numel()])


def check_block(block: object) -> None:
    """Check the size of a block.

    Raises:
        ValueError: `block` is not a multiple of 8 from 8 to 131072.
    """
    if not isinstance(block, int) or not 8 <= block <= _PIECE or block % 8:
        raise ValueError(f"block={block!r} is not a multiple of 8 from 8 to {_PIECE}")


def _shapes(numel: int, block: int) -> list[tuple[int, int]]:
    """The pieces' ``(blocks, numbers of a block)``: as many whole blocks as fit into a cache, then a partial block."""
    whole, rest = divmod(numel, block)
    per_piece = _PIECE // block
    shapes = [(min(per_piece, whole - row), block) for row in range(0, whole, per_piece)]
    return [*shapes, (1, rest)] if rest else shapes


def _pieces(flat: Tensor, block: int) -> list[Tensor]:
    """The pieces of `flat`, as views of the shape ``[blocks, numbers of a block]``."""
    shapes = _shapes(flat.numel(), block)
    return [part.view(shape) for part, shape in zip(flat.split([rows * n for rows, n in shapes]), shapes)]


def _pieces_or_none(flat: Tensor | None, block: int) -> Iterable[Tensor | None]:
    return repeat(None) if flat is None else _pieces(flat, block)


class _Scratch:
    """Memory for one piece, allocated once per message."""

    def __init__(self, numel: int, block: int, device: torch.device) -> None:
        most = min(-(-numel // 8) * 8, _PIECE)
        self._floats = torch.empty(most, device=device)
        self.bytes = torch.empty(most, dtype=torch.uint8, device=device)

    def floats(self, like: Tensor) -> Tensor:
        """A float buffer of the shape of `like`."""
        return self._floats[: like.numel()].view(like.shape)
