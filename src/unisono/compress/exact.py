"""Send gradients rounded to a grid on which sums of floats are exact, so that a sum depends on no order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.compress.compressor import Codec, CollectiveVerbs, Compressor, Mean
from unisono.compress.memory import CompressorMemory
from unisono.compress.span import Span

_CHUNK = 1 << 19  # numbers; more do not stay in the cache that cores share from one pass to the next


@dataclass(frozen=True)
class Exact(Codec):
    """Each micro-batch's gradient is rounded to multiples of 2^-fraction_bits before anything is added.

    Totals are float64, which holds every multiple of 2^-fraction_bits below 2^(53 - fraction_bits) exactly. As long as
    all partial sums stay below that, no addition rounds. The mean then does not depend on how many workers there are,
    who computed what, or in which order messages came: the weights are the same bits. Costs 8 bytes per number on the
    wire. With `fraction_bits` = 40 the resolution is 9.1e-13 (rounding is to nearest, ties to even), and the weighted
    gradient of each of M micro-batches may reach 8192 / M in each number.

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
        """The largest magnitude of one addend with which all sums stay exact."""
        return 2.0 ** (53 - self.fraction_bits) / self.addends

    def for_sums_of(self, addends: int) -> Compressor:
        return _ExactSums(self.fraction_bits, addends)

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64

    def add(self, total: Tensor, gradient: Tensor, weight: float, first: bool) -> None:
        for part, piece in _chunks(total, gradient, _CHUNK // 4):
            self.fold(part, piece.to(torch.float64) * (weight * 2.0**self.fraction_bits), first)

    @property
    def buffered(self) -> Exact:
        return self

    def buffer_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)

    def writes(self, weight: float) -> bool:
        return math.frexp(weight)[0] == 0.5  # a power of two changes the exponent alone, so nothing is rounded

    def write(self, buffer: Tensor, gradient: Tensor, weight: float) -> None:
        scale = weight * 2.0**self.fraction_bits
        if gradient.dtype == buffer.dtype:
            torch.mul(gradient, scale, out=buffer)
        else:
            buffer.copy_(gradient).mul_(scale)

    def fold(self, total: Tensor, buffer: Tensor, first: bool) -> None:
        grid = 2.0**-self.fraction_bits
        for part, piece in _chunks(total, buffer, _CHUNK):
            self._check(piece, grid)
            piece.round_().mul_(grid)
            if first:
                part.copy_(piece)
            else:
                part.add_(piece)

    def value(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return total.to(dtype)

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=torch.float64, device=device)

    def encode(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        return total

    def owe(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        return total

    def decode(self, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
        return message

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        return (yield comm.sum(total, dtype))  # type: ignore[no-any-return]

    def _check(self, counted: Tensor, grid: float) -> None:
        """Raises `ValueError` if a number, in multiples of the grid, is too large or NaN.

        No number is larger than the root of the sum of squares, which takes less time than the extremes. Where that is
        small enough (a thousandth is left for its own rounding), nothing more is looked at.
        """
        flat = counted.reshape(-1)
        if float(torch.dot(flat, flat)) <= 0.999 * (self.bound / grid) ** 2:
            return
        least, most = torch.aminmax(flat)
        # NaN compares false, so the negated comparison catches it together with what is too large.
        if not max(-float(least), float(most)) * grid <= self.bound:
            largest = float(counted.abs().amax()) * grid
            raise ValueError(
                f"a gradient that counts with magnitude {largest:g} is outside the range ±{self.bound:g} of exact sums "
                f"of {self.addends}; fewer fraction_bits give a larger one"
            )


@dataclass(frozen=True)
class _ExactSums(Exact):
    """`Exact` that knows how many gradients one sum has."""

    addends: int = 1


def _chunks(total: Tensor, other: Tensor, numel: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Both in the same pieces of up to `numel` elements; whole, where they lie in memory otherwise."""
    if total.numel() <= numel or not (total.is_contiguous() and other.is_contiguous()):
        return [(total, other)]
    return zip(total.view(-1).split(numel), other.view(-1).split(numel))
