"""A compressor that sends random elements of a gradient, the same on all workers, with error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.compress.compressor import Codec, CollectiveVerbs, Mean
from unisono.compress.memory import RESIDUAL, CompressorMemory, accumulated
from unisono.compress.span import Span
from unisono.compress.top_k import count

_DRAW_BYTES = 8


@dataclass(frozen=True)
class RandomK(Codec):
    """Sends ``density * n`` of n numbers, drawn at random, as fp32, with error feedback.

    Random-k of Stich et al. 2018, "Sparsified SGD with memory". The n numbers are divided into ``density * n`` runs of
    almost equal length. Each message contains one number of each run: first a random one, then the next in cyclic
    order, until all have been sent; then a new cycle begins. So no residual is older than ``2 / density`` messages.
    Values are not divided by `density`, which would make messages unbiased but multiply their variance by
    ``1 / density``; error feedback corrects the bias instead.

    All workers draw the same elements, from `seed` and the count of messages. So their messages are additive: `mean` is
    one sum of values, without indices. Where `mean` is not used (servers, gossip), a message begins with the number of
    its draw, in 8 bytes.

    A residual is applied ``1 / density`` steps late and all at once, like the gradient of a batch larger by that
    factor. A learning rate that is stable without compression may be unstable with it, above all with momentum. With a
    momentum of 0.9, a density of 0.3 did no harm, and 0.1 did. `TopK` sends large residuals earlier.

    If any number of a total is not finite, all values of its message are not finite.

    Args:
        density: the fraction of the numbers that one message contains.
        seed: the seed of the draws.

    Raises:
        ValueError: `density` is outside (0, 1], or `seed` is not a whole number from 0 to 2^31 - 1.
    """

    density: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density={self.density!r} is not above 0 and at most 1")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed!r} is not a whole number from 0 to 2^31 - 1")

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)  # residuals would be lost by rounding in a 16-bit sum

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(_DRAW_BYTES + 4 * count(self.density, numel), dtype=torch.uint8, device=device)

    def encode(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        draw = _next_draw(memory)
        return _message(draw, _values(total, self._indices(draw, total.numel(), total.device)))

    def encode_with_feedback(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        draw = _next_draw(memory)
        return _message(draw, self._take_values(total, memory, draw))

    def decode(self, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
        length = _DRAW_BYTES + 4 * count(self.density, numel)
        if message.dtype != torch.uint8 or message.shape != (length,):
            raise ValueError(
                f"a message of {tuple(message.shape)} {message.dtype}, where {length} bytes are expected for "
                f"{numel} numbers"
            )
        draw = int(message[:_DRAW_BYTES].clone().view(torch.int64))
        if draw < 0:
            raise ValueError(f"a message with draw number {draw}, which is below 0")
        values = message[_DRAW_BYTES:].clone().view(torch.float32)
        return self._spread(draw, values, torch.zeros(numel, dtype=dtype, device=message.device))

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        draw = _next_draw(memory)
        values = yield comm.sum(self._take_values(total, memory, draw))
        return self.value(self._spread(draw, values, total.zero_()), dtype)

    def _take_values(self, total: Tensor, memory: CompressorMemory, draw: int) -> Tensor:
        """The values of this draw in `total` plus the residual, from which they are subtracted."""
        residual = accumulated(total, memory, RESIDUAL)
        indices = self._indices(draw, total.numel(), total.device)
        values = _values(residual, indices)
        residual.index_add_(0, indices, values.to(residual.dtype), alpha=-1)
        return values

    def _spread(self, draw: int, values: Tensor, zeros: Tensor) -> Tensor:
        indices = self._indices(draw, zeros.numel(), zeros.device)
        return zeros.index_copy_(0, indices, values.to(zeros.dtype))

    def _indices(self, draw: int, numel: int, device: torch.device) -> Tensor:
        """The increasing indices of draw number `draw`, the same on every device."""
        k = count(self.density, numel)
        if not k:
            return torch.empty(0, dtype=torch.int64, device=device)
        cycle, offset = divmod(draw, -(-numel // k))
        mixed = (self.seed * 2654435761 + cycle) % 2**32  # torch's CPU generator uses 32 bits of its seed
        first = torch.randint(2**31, (k,), generator=torch.Generator().manual_seed(mixed))
        starts = torch.arange(k + 1) * numel // k
        return (starts[:-1] + (first + offset) % starts.diff()).to(device)


def _next_draw(memory: CompressorMemory) -> int:
    draw: int = memory.get("draw", 0)
    memory.put("draw", draw + 1)
    return draw


def _values(x: Tensor, indices: Tensor) -> Tensor:
    """The numbers of `x` at `indices`, in fp32; none is finite if a number of `x` is not."""
    return x.index_select(0, indices).to(torch.float32).add_((x.sum() * 0).to(torch.float32))


def _message(draw: int, values: Tensor) -> Tensor:
    head = torch.tensor([draw], device=values.device)
    return torch.cat([head.view(torch.uint8), values.view(torch.uint8)])
