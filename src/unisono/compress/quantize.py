"""Send 8- or 4-bit whole numbers, with a scale per block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.compress.block_codec import SCALE, Blocks, check_block
from unisono.compress.dither import Dither
from unisono.compress.memory import CompressorMemory
from unisono.compress.span import Span

_SMALLEST = torch.finfo(SCALE).tiny  # its reciprocal is finite
_UP = 1 + 2**-8  # a scale that bf16 has rounded is not below the largest number's


@dataclass(frozen=True)
class Quantize(Blocks):
    """A number travels as ``q = round(x / s)``, ``|q| <= L``, with ``s = max|x| / L`` of its block, L = 127 or 7.

    Block-wise absmax quantization (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", section 2.1),
    linear, with scales in bf16: ``bits + 16 / block`` bits per number. The error of a number is at most half a step
    ``s``, and is owed. With `stochastic`, ``q = floor(x / s + u)`` with u uniform in [0, 1): the expectation of what
    arrives is x (Alistarh et al. 2017, "QSGD", section 3.1), the error below one step, and nothing is owed
    (`WithErrorFeedback` would). A block that holds what is not finite arrives as NaN.

    Args:
        bits: 8 or 4.
        stochastic: round up or down at random, without bias, instead of to nearest.
        block: numbers that share a scale.

    Raises:
        ValueError: `bits` is neither 8 nor 4; `block` is not a multiple of 8 from 8 to 131072.
    """

    bits: int = 8
    stochastic: bool = False
    block: int = 128

    def __post_init__(self) -> None:
        if self.bits not in (8, 4) or isinstance(self.bits, bool):
            raise ValueError(f"bits={self.bits!r} is neither 8 nor 4")
        if not isinstance(self.stochastic, bool):
            raise ValueError(f"stochastic={self.stochastic!r} is neither True nor False")
        check_block(self.block)

    @property
    def owes(self) -> bool:
        return not self.stochastic

    @property
    def code_bits(self) -> int:
        return self.bits

    def owe(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        return self.encode(total, spans, memory) if self.stochastic else super().owe(total, spans, memory)

    def dither(self, total: Tensor, memory: CompressorMemory) -> Dither | None:
        return Dither(total, memory) if self.stochastic else None

    def scales(self, x: Tensor, scratch: Tensor) -> Tensor:
        largest = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_())
        return largest.mul_(_UP / (2 ** (self.bits - 1) - 1)).clamp_(min=_SMALLEST).to(SCALE)

    def levels(self, x: Tensor, scales: Tensor, dither: Tensor | None, out: Tensor) -> None:
        torch.mul(x, scales.reciprocal(), out=out)
        if dither is None:
            out.round_()
        else:
            out.add_(dither).floor_()
