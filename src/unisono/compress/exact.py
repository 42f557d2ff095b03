"""Send gradients as fixed-point integers, whose sum depends on no order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.compress.compressor import Codec, Mean, Wire
from unisono.compress.memory import Memory
from unisono.compress.span import Span


@dataclass(frozen=True)
class Exact(Codec):
    """Each micro-batch's gradient becomes 64-bit fixed point before anything is added, inside a worker too.

    Integer addition is associative and commutative, so the mean does not depend on how many workers there are, who
    computed what, or in which order messages came: the weights are the same bits. Costs 8 bytes per number on the
    wire. With `fraction_bits` = 40 the resolution is 9.1e-13 and a micro-batch's weighted gradient may reach 4096 in
    each number, which leaves room for 1024 micro-batches of that size (rounding is to nearest, ties to even).

    Raises:
        ValueError: `fraction_bits` outside 8..48.
    """

    fraction_bits: int = 40

    def __post_init__(self) -> None:
        if not isinstance(self.fraction_bits, int) or not 8 <= self.fraction_bits <= 48:
            raise ValueError(f"fraction_bits={self.fraction_bits!r} is not a whole number from 8 to 48")

    @property
    def adds_up(self) -> bool:
        return True

    @property
    def owes(self) -> bool:
        return False

    @property
    def bound(self) -> float:
        """The largest magnitude of one addend; 2^10 of them cannot overflow 63 bits."""
        return 2.0 ** (52 - self.fraction_bits)

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.int64

    def add(self, total: Tensor, gradient: Tensor, weight: float, first: bool) -> None:
        fixed = gradient.to(torch.float64, copy=True).mul_(weight * 2.0**self.fraction_bits).round_()
        # NaN compares false, so the negated comparison catches it together with what is too large.
        if fixed.numel() and not float(fixed.abs().amax()) <= self.bound * 2.0**self.fraction_bits:
            largest = float(gradient.abs().amax())
            raise ValueError(f"a gradient of magnitude {largest:g} is outside the fixed-point range ±{self.bound:g}")
        if first:
            total.copy_(fixed)
        else:
            total.add_(fixed.to(torch.int64))

    def value(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return total.to(torch.float64).mul_(2.0**-self.fraction_bits).to(dtype)

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=torch.int64, device=device)

    def encode(self, total: Tensor, spans: Sequence[Span], memory: Memory) -> Tensor:
        return total

    def owe(self, total: Tensor, spans: Sequence[Span], memory: Memory) -> Tensor:
        return total

    def decode(self, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
        return message

    def mean(self, total: Tensor, spans: Sequence[Span], comm: Wire, memory: Memory, dtype: torch.dtype) -> Mean:
        summed = yield comm.sum(total)
        return self.value(summed, dtype)
