"""A compressor that sends gradients as plus, minus or zero times a fixed threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from unisono.compress.block_codec import BlockCodec


@dataclass(frozen=True)
class TwoBit(BlockCodec):
    """Sends ``t * sign(x)`` where ``|x| >= t``, else 0, with error feedback, in two bits per number.

    As in MXNet's ``gradient_compression={"type": "2bit", "threshold": t}``; Strom 2015, "Scalable Distributed DNN
    Training Using Commodity GPU Cloud Computing", section 3.

    The threshold is **absolute**: it is compared with a worker's weighted part of the mean gradient (with n workers,
    about 1/n of it). The residual of a number that exceeds `t` at every step grows without bound; far smaller numbers
    are sent after ``t / |x|`` steps. Start with about the largest magnitude of usual gradients. (`OneBit` and
    `Quantize` measure their scales.) A block with a number that is not finite arrives as NaN, which is the fourth code.

    Args:
        threshold: t, in units of the gradient.

    Raises:
        ValueError: `threshold` is not a number from 1e-30 to 1e30.
    """

    threshold: float

    def __post_init__(self) -> None:
        number = isinstance(self.threshold, int | float) and not isinstance(self.threshold, bool)
        if not number or not 1e-30 <= self.threshold <= 1e30:
            raise ValueError(f"threshold={self.threshold!r} is not a number from 1e-30 to 1e30")

    @property
    def block(self) -> int:  # type: ignore[override]
        """The size of a block, all of which becomes NaN if one of its numbers is not finite."""
        return 256

    @property
    def code_bits(self) -> int:
        return 2

    @property
    def scaled(self) -> bool:
        return False

    def scales(self, x: Tensor, scratch: Tensor) -> Tensor:
        """The threshold, or NaN for a block with a number that is not finite."""
        return x.amax(1, keepdim=True).mul_(0).add_(x.amin(1, keepdim=True).mul_(0)).add_(self.threshold)

    @property
    def _below(self) -> float:
        """The largest fp32 number below the threshold."""
        return torch.nextafter(torch.tensor(self.threshold), torch.tensor(0.0)).item()

    def levels(self, x: Tensor, scales: Tensor, dither: Tensor | None, out: Tensor) -> None:
        torch.hardshrink(x, self._below, out=out).sign_()  # it keeps what is above, and the threshold is to be kept
        most = torch.full_like(scales, 1).masked_fill_(scales.isnan(), self.lowest)
        torch.minimum(out, most, out=out)

    def values(self, levels: Tensor, scales: Tensor) -> None:
        functional.threshold(levels, self.lowest + 0.5, math.nan, inplace=True).mul_(self.threshold)
