"""Send gradients rounded to a grid on which sums of floats are exact, so that a sum depends on no order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.compress.compressor import Codec, Compressor, Mean, Wire
from unisono.compress.memory import Memory
from unisono.compress.span import Span

_CHUNK = 1 << 15  # numbers; as float64 they stay in a core's cache from one pass to the next


@dataclass(frozen=True)
class Exact(Codec):
    """Each micro-batch's gradient is rounded to multiples of 2^-fraction_bits before anything is added.

    Totals are float64, which holds every multiple of 2^-fraction_bits below 2^(53 - fraction_bits) exactly. As long as
    all partial sums stay below that, no addition rounds. The mean then does not depend on how many workers there are,
    who computed what, or in which order messages came: the weights are the same bits. Costs 8 bytes per number on the
    wire. With `fraction_bits` = 40 the resolution is 9.1e-13 (rounding is to nearest, ties to even), and the weighted
    gradient of each of M micro-batches may reach 8192 / M in each number, and 2048 at most.

    Raises:
        ValueError: `fraction_bits` outside 8..48.
    """

    fraction_bits: int = 40
    addends = 1  # of one sum; no field, since it is not for users to choose

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
    def finite(self) -> bool:
        return True

    @property
    def bound(self) -> float:
        """The largest magnitude of one addend: sums stay exact, and `add` can round it."""
        return min(2.0 ** (53 - self.fraction_bits) / self.addends, 2.0 ** (51 - self.fraction_bits))

    def for_sums_of(self, addends: int) -> Compressor:
        return _ExactSums(self.fraction_bits, addends)

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64

    def add(self, total: Tensor, gradient: Tensor, weight: float, first: bool) -> None:
        self._check(gradient, weight)
        # Above 2^(52 - fraction_bits), the distance between two numbers of float64 is the grid's.
        shift = 1.5 * 2.0 ** (52 - self.fraction_bits)
        for part, piece in _chunks(total, gradient):
            rounded = part if first else torch.empty_like(part)
            rounded.copy_(piece).mul_(weight).add_(shift).sub_(shift)
            if not first:
                part.add_(rounded)

    def value(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return total.to(dtype)

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=torch.float64, device=device)

    def encode(self, total: Tensor, spans: Sequence[Span], memory: Memory) -> Tensor:
        return total

    def owe(self, total: Tensor, spans: Sequence[Span], memory: Memory) -> Tensor:
        return total

    def decode(self, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
        return message

    def mean(self, total: Tensor, spans: Sequence[Span], comm: Wire, memory: Memory, dtype: torch.dtype) -> Mean:
        summed = yield comm.sum(total)
        return self.value(summed, dtype)

    def _check(self, gradient: Tensor, weight: float) -> None:
        if not gradient.numel():
            return
        least, most = (float(x) for x in torch.aminmax(gradient))
        # NaN compares false, so the negated comparison catches it together with what is too large.
        if not max(-least, most) * abs(weight) <= self.bound:
            largest = float(gradient.abs().amax())
            raise ValueError(
                f"a gradient of magnitude {largest:g} that counts {weight:g} is outside the range ±{self.bound:g} of "
                f"exact sums of {self.addends}; fewer fraction_bits give a larger one"
            )


@dataclass(frozen=True)
class _ExactSums(Exact):
    """`Exact` that knows how many gradients one sum has."""

    addends: int = 1


def _chunks(total: Tensor, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both in the same pieces, each small enough to stay in the cache; whole, where they lie in memory otherwise."""
    if total.is_contiguous() and gradient.is_contiguous():
        return zip(total.view(-1).split(_CHUNK), gradient.view(-1).split(_CHUNK))
    return iter([(total, gradient)])
