"""Send plus, minus or nothing, by a fixed threshold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from unisono.compress.blocks import Blocks


@dataclass(frozen=True)
class TwoBit(Blocks):
    """A number travels as ``+t``, ``-t`` or nothing: ``t * sign(x)`` where ``|x| >= t``. The rest is owed.

    As in MXNet's ``gradient_compression={"type": "2bit", "threshold": t}``; Strom 2015, "Scalable Distributed DNN
    Training Using Commodity GPU Cloud Computing", section 3. Two bits per number.

    The threshold is **absolute**: it is compared with what is sent, a worker's weighted part of the mean gradient (of
    n workers, about 1/n of it). Numbers that are larger than `t` at every step are never paid off; far smaller ones
    wait for ``t / |x|`` steps. About the largest magnitude of usual gradients is a good start. (`OneBit` and
    `Quantize` measure theirs.) A number that is not finite makes its block arrive as NaN: the fourth code.

    Args:
        threshold: t, in units of the gradient.

    Raises:
        ValueError: `threshold` is not a finite number above 0.
    """

    threshold: float

    block = 256
    code_bits = 2
    scaled = False

    def __post_init__(self) -> None:
        number = isinstance(self.threshold, int | float) and not isinstance(self.threshold, bool)
        if not number or not 0 < self.threshold < float("inf"):
            raise ValueError(f"threshold={self.threshold!r} is not a finite number above 0")
