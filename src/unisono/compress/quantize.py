"""A compressor that sends gradients as 8- or 4-bit whole numbers, with one scale per block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.compress.block_codec import SCALE, BlockCodec, check_block
from unisono.compress.dither import Dither
from unisono.compress.memory import CompressorMemory
from unisono.compress.span import Span

_SMALLEST = torch.finfo(SCALE).tiny  # its reciprocal is finite
_UP = 1 + 2**-8  # so that a scale rounded to bf16 is not too small for the largest number


@dataclass(frozen=True)
class Quantize(BlockCodec):
    """Sends ``q = round(x / s)``, ``|q| <= L``, with the block's scale ``s = max|x| / L``, L = 127 or 7.

    Block-wise absmax quantization (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", section 2.1),
    linear, with scales in bf16: ``bits + 16 / block`` bits per number. The error of a number is at most ``s / 2``, with
    error feedback. With `stochastic`, ``q = floor(x / s + u)`` with u uniform in [0, 1): the expectation of the result
    is x (Alistarh et al. 2017, "QSGD", section 3.1), the error is below ``s``, and there is no error feedback
    (`WithErrorFeedback` adds it). A block with a number that is not finite arrives as NaN.

    Args:
        bits: 8 or 4.
        stochastic: whether to round up or down at random, without bias, instead of to nearest.
        block: how many numbers share a scale.

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
    def keeps_residual(self) -> bool:
        return not self.stochastic

    @property
    def code_bits(self) -> int:
        return self.bits

    def encode_with_feedback(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        return (
            self.encode(total, spans, memory) if self.stochastic else super().encode_with_feedback(total, spans, memory)
        )

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
