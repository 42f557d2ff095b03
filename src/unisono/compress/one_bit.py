"""A compressor that sends the signs of gradients, with one magnitude per block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.compress.block_codec import SCALE, BlockCodec, check_block


@dataclass(frozen=True)
class OneBit(BlockCodec):
    """Sends the sign of each number and the mean magnitude of its block: ``mean|x| * sign(x)``.

    Seide et al. 2014, "1-Bit Stochastic Gradient Descent", with one magnitude per block as in Zheng et al. 2019,
    "Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback" (definition 1). A message takes
    ``1 + 16 / block`` bits per number. Signs need error feedback to converge (Karimireddy et al. 2019). Zero counts as
    positive; by error feedback, a zero among other numbers arrives as plus and minus the magnitude alternately. A block
    with a number that is not finite arrives as not finite.

    Args:
        block: how many numbers share a magnitude.

    Raises:
        ValueError: `block` is not a multiple of 8 from 8 to 131072.
    """

    block: int = 256

    def __post_init__(self) -> None:
        check_block(self.block)

    @property
    def code_bits(self) -> int:
        return 1

    @property
    def step(self) -> int:
        return 2

    def scales(self, x: Tensor, scratch: Tensor) -> Tensor:
        return torch.abs(x, out=scratch).mean(1, keepdim=True).to(SCALE)

    def levels(self, x: Tensor, scales: Tensor, dither: Tensor | None, out: Tensor) -> None:
        torch.copysign(torch.ones((), device=x.device), x, out=out)
