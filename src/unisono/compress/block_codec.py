"""What travels as small whole numbers with a scale per block: the frame of `Quantize`, `OneBit` and `TwoBit`.

    message   ┌ scale of block 0, 1, ... (bf16) ┬ codes of block 0, 1, ... ┐   uint8
              └─────────────────────────────────┴──────────────────────────┘
    arrives   level * scale, where level = lowest + step * code

Blocks are worked through in pieces that stay in a core's cache from the first pass over them to the last, and what is
left out is a by-product of the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

import torch
from torch import Tensor

from unisono.compress.bit_packing import pack, packed, unpack
from unisono.compress.compressor import Codec
from unisono.compress.dither import PERIOD, Dither
from unisono.compress.memory import CompressorMemory
from unisono.compress.span import Span

_PIECE = PERIOD  # numbers: 512 KiB of fp32, for a core's second-level cache; fewer cost more calls than they save
_ALIGN = 8  # bytes: rows of a gather lie one behind the other
SCALE = torch.bfloat16  # the range of fp32, so that no block is too small or too large for it


class Blocks(Codec):
    """A subclass gives `code_bits`, `scales` and `levels`, and the other figures where they differ.

    Args:
        block: numbers that share a scale; the last block may be shorter.
    """

    block: int

    @property
    def code_bits(self) -> int:
        """Bits of one code: 1, 2, 4 or 8."""
        raise NotImplementedError

    @property
    def step(self) -> int:
        """From one level to the next: 1 or 2."""
        return 1

    @property
    def lowest(self) -> int:
        """The level of code 0."""
        return -(1 << (self.code_bits - 1))

    @property
    def scaled(self) -> bool:
        """Whether scales travel."""
        return True

    def scales(self, x: Tensor, scratch: Tensor) -> Tensor:
        """One scale per row of `x` (fp32 of shape ``[blocks, block]``): ``[blocks, 1]``, bf16 where they travel.
        `scratch` is like `x` and may be written into."""
        raise NotImplementedError

    def levels(self, x: Tensor, scales: Tensor, dither: Tensor | None, out: Tensor) -> None:
        """Write the whole number that each number of `x` becomes into `out`, which is like `x`."""
        raise NotImplementedError

    def values(self, levels: Tensor, scales: Tensor) -> None:
        """Turn `levels` into what arrives, in place."""
        levels.mul_(scales)

    def dither(self, total: Tensor, memory: CompressorMemory) -> Dither | None:
        """What is added before rounding down, or None where rounding is to nearest."""
        return None

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)  # what is owed would vanish in a 16-bit sum

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(self._length(numel), dtype=torch.uint8, device=device)

    def encode(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        return self._send(total, None, None, self.dither(total, memory))

    def owe(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        left = memory.spare("owed")
        if left is None:
            left = torch.empty(total.numel(), dtype=total.dtype, device=total.device)
        message = self._send(total, memory.get("owed"), left, self.dither(total, memory))
        memory.put("owed", left)
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

    def _send(self, total: Tensor, owed: Tensor | None, left: Tensor | None, dither: Dither | None) -> Tensor:
        """The message for ``total + owed``, which `total` becomes; what it leaves out goes to `left`."""
        numel, start = total.numel(), 0
        message = self.blank((), numel, total.dtype, total.device)
        message[-_ALIGN:].zero_()  # what fills it up is no chance content of memory
        scratch = _Scratch(numel, self.block, total.device)
        debts, remains = _pieces_or_none(owed, self.block), _pieces_or_none(left, self.block)
        parts = _pieces(total, self.block)
        for part, debt, remain, codes, scale in zip(parts, debts, remains, *self._fields(message, numel)):
            x = (part if debt is None else part.add_(debt)).float()
            levels = scratch.floats(x)
            travels = self.scales(x, levels)
            if self.scaled:
                scale.copy_(travels)
            travels = travels.float()
            self.levels(x, travels, dither.of(start, x) if dither else None, levels)
            self._pack(levels.view(-1), scratch, codes)
            if remain is not None:
                target = remain if remain.dtype == torch.float32 else levels
                torch.addcmul(x, levels, travels, value=-1, out=target)
                if target is not remain:
                    remain.copy_(target)
            start += x.numel()
        return message

    def _head(self, numel: int) -> int:
        """Bytes of the scales."""
        return -(-numel // self.block) * SCALE.itemsize if self.scaled else 0

    def _length(self, numel: int) -> int:
        """Bytes of the message."""
        return -(-(self._head(numel) + packed(numel, self.code_bits)) // _ALIGN) * _ALIGN

    def _fields(self, message: Tensor, numel: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """For each piece its codes, and its scales as a column."""
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
        pack(whole.bitwise_and_((1 << bits) - 1), bits, codes)  # NaN becomes any byte; its neighbours stay theirs

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
    """
    Raises:
        ValueError: not a multiple of 8 from 8 to 131072.
    """
    if not isinstance(block, int) or not 8 <= block <= _PIECE or block % 8:
        raise ValueError(f"block={block!r} is not a multiple of 8 from 8 to {_PIECE}")


def _shapes(numel: int, block: int) -> list[tuple[int, int]]:
    """The pieces' ``(blocks, numbers of a block)``: as many whole blocks as fit into a cache, then what is left of
    a block."""
    whole, rest = divmod(numel, block)
    together = _PIECE // block
    shapes = [(min(together, whole - row), block) for row in range(0, whole, together)]
    return [*shapes, (1, rest)] if rest else shapes


def _pieces(flat: Tensor, block: int) -> list[Tensor]:
    """One view of `flat` per piece, in its shape."""
    shapes = _shapes(flat.numel(), block)
    return [part.view(shape) for part, shape in zip(flat.split([rows * n for rows, n in shapes]), shapes)]


def _pieces_or_none(flat: Tensor | None, block: int) -> Iterable[Tensor | None]:
    return repeat(None) if flat is None else _pieces(flat, block)


class _Scratch:
    """Memory for one piece, taken once for a message."""

    def __init__(self, numel: int, block: int, device: torch.device) -> None:
        most = min(-(-numel // 8) * 8, _PIECE)
        self._floats = torch.empty(most, device=device)
        self.bytes = torch.empty(most, dtype=torch.uint8, device=device)

    def floats(self, like: Tensor) -> Tensor:
        """Of the shape of `like`."""
        return self._floats[: like.numel()].view(like.shape)
