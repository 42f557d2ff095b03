"""A compressor that rounds gradients to a grid on which sums are exact, so that a sum does not depend on its order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.compress.compressor import Codec, CollectiveVerbs, Compressor, Mean
from unisono.compress.memory import CompressorMemory
from unisono.compress.span import Span

_CHUNK = 1 << 19  # numbers that stay in the shared cache from one pass over them to the next


@dataclass(frozen=True)
class Exact(Codec):
    """Rounds the gradient of each micro-batch to multiples of 2^-fraction_bits before it is added.

    Totals are float64, which represents every multiple of 2^-fraction_bits below 2^(53 - fraction_bits) exactly. While
    all partial sums are below that, no addition rounds. The bits of the mean then do not depend on the number of
    workers, on which worker computed which micro-batch, or on the order of messages. A message takes 8 bytes per
    number. With `fraction_bits` = 40, the resolution is 9.1e-13 (rounding is to nearest, ties to even). Each number of
    the weighted gradient of each of M micro-batches may then reach 8192 / M.

    Raises:
        ValueError: `fraction_bits` is outside 8..48.
    """

    fraction_bits: int = 40
    addends = 1  # the number of gradients in one sum; not a field, since users do not choose it

    def __post_init__(self) -> None:
        if not isinstance(self.fraction_bits, int) or not 8 <= self.fraction_bits <= 48:
            raise ValueError(f"fraction_bits={self.fraction_bits!r} is not a whole number from 8 to 48")

    @property
    def is_additive(self) -> bool:
        return True

    @property
    def keeps_residual(self) -> bool:
        return False

    @property
    def finite(self) -> bool:
        return True

    @property
    def bound(self) -> float:
        """The largest magnitude of a number of one gradient for which all sums are exact."""
        return 2.0 ** (53 - self.fraction_bits) / self.addends

    def for_sums_of(self, addends: int) -> Compressor:
        return ExactSums(self.fraction_bits, addends)

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
        return math.frexp(weight)[0] == 0.5  # a power of two changes only the exponent, so nothing is rounded

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

    def encode_with_feedback(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        return total

    def decode(self, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
        return message

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        return (yield comm.sum(total, dtype))  # type: ignore[no-any-return]

    def _check(self, counted: Tensor, grid: float) -> None:
        """Raise `ValueError` if a number of `counted`, in multiples of the grid, is too large or NaN.

        No number exceeds the root of the sum of squares, which is faster to compute than the extremes. If that root is
        within the bound (less a thousandth for its own rounding), no further check is needed.
        """
        flat = counted.reshape(-1)
        if float(torch.dot(flat, flat)) <= 0.999 * (self.bound / grid) ** 2:
            return
        least, most = torch.aminmax(flat)
        # NaN compares false, so the negated comparison catches it too.
        if not max(-float(least), float(most)) * grid <= self.bound:
            largest = float(counted.abs().amax()) * grid
            cure = "fewer fraction_bits give a larger range"
            if not math.isfinite(largest):
                cure = "where steps overflow and are left out, as with a GradScaler, use Cast()"
            raise ValueError(
                f"a gradient of weighted magnitude {largest:g} is outside the range ±{self.bound:g} of exact sums of "
                f"{self.addends} gradients; {cure}"
            )


@dataclass(frozen=True)
class ExactSums(Exact):
    """`Exact` with the number of gradients in one sum; made by `Exact.for_sums_of`."""

    addends: int = 1


def _chunks(total: Tensor, other: Tensor, numel: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Both tensors in equal pieces of up to `numel` elements, or as one piece unless both are contiguous."""
    if total.numel() <= numel or not (total.is_contiguous() and other.is_contiguous()):
        return [(total, other)]
    return zip(total.view(-1).split(numel), other.view(-1).split(numel))
