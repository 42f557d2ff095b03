"""Send random numbers, the same on all workers, and owe the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.compress.compressor import Codec, CollectiveVerbs, Mean
from unisono.compress.memory import CompressorMemory, accumulated
from unisono.compress.span import Span
from unisono.compress.top_k import count

_DRAW_BYTES = 8


@dataclass(frozen=True)
class RandomK(Codec):
    """Random-k with error feedback (Stich et al. 2018, "Sparsified SGD with memory"): ``density * n`` of n numbers
    travel, each as fp32.

    The n numbers are cut into ``density * n`` runs of almost equal length, and of each run one number travels: the
    first one is drawn, then they take turns, until each has had its turn and another first one is drawn. So nothing is
    owed for longer than ``2 / density`` sends. Values are not divided by `density`, which would make each message
    unbiased and its variance ``1 / density`` times as large: what is left out is owed instead.

    All workers draw the same numbers, from `seed` and a count of draws. So their messages add up: `mean` is one sum of
    values, without any index. Elsewhere (server, gossip) a message says its draw in 8 bytes.

    What is owed arrives ``1 / density`` steps late and at once, as the gradient of so much larger a batch would. A rate
    of learning that is stable without compression may not be with it, above all with momentum in the optimizer: where
    that is 0.9, a density of 0.3 did no harm, and 0.1 did. `TopK` sends what grows before it is late.

    A total that is not finite makes all values not finite, whether what is not was drawn or not.

    Raises:
        ValueError: `density` outside (0, 1], `seed` not a whole number from 0 to 2^31 - 1.
    """

    density: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density={self.density!r} is not above 0 and at most 1")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed!r} is not a whole number from 0 to 2^31 - 1")

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)  # what is owed for long would vanish in 16 bits

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(_DRAW_BYTES + 4 * count(self.density, numel), dtype=torch.uint8, device=device)

    def encode(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        draw = _next_draw(memory)
        return _message(draw, _values(total, self._places(draw, total.numel(), total.device)))

    def owe(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        draw = _next_draw(memory)
        return _message(draw, self._owe(total, memory, draw))

    def decode(self, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
        length = _DRAW_BYTES + 4 * count(self.density, numel)
        if message.dtype != torch.uint8 or message.shape != (length,):
            raise ValueError(f"a message of {tuple(message.shape)} {message.dtype} is not one of {length} bytes")
        draw = int(message[:_DRAW_BYTES].clone().view(torch.int64))
        if draw < 0:
            raise ValueError(f"draw {draw} is not a count")
        values = message[_DRAW_BYTES:].clone().view(torch.float32)
        return self._spread(draw, values, torch.zeros(numel, dtype=dtype, device=message.device))

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        draw = _next_draw(memory)
        values = yield comm.sum(self._owe(total, memory, draw))
        return self.value(self._spread(draw, values, total.zero_()), dtype)

    def _owe(self, total: Tensor, memory: CompressorMemory, draw: int) -> Tensor:
        """The values of this draw, out of `total` and what is owed, which then is less by them."""
        left = accumulated(total, memory, "owed")
        places = self._places(draw, total.numel(), total.device)
        values = _values(left, places)
        left.index_add_(0, places, values.to(left.dtype), alpha=-1)
        return values

    def _spread(self, draw: int, values: Tensor, zeros: Tensor) -> Tensor:
        places = self._places(draw, zeros.numel(), zeros.device)
        return zeros.index_copy_(0, places, values.to(zeros.dtype))

    def _places(self, draw: int, numel: int, device: torch.device) -> Tensor:
        """Indices of draw number `draw`, increasing; the same on every device."""
        k = count(self.density, numel)
        if not k:
            return torch.empty(0, dtype=torch.int64, device=device)
        cycle, turn = divmod(draw, -(-numel // k))
        mixed = (self.seed * 2654435761 + cycle) % 2**32  # torch's generator on a CPU looks at 32 bits of its seed
        first = torch.randint(2**31, (k,), generator=torch.Generator().manual_seed(mixed))
        starts = torch.arange(k + 1) * numel // k
        return (starts[:-1] + (first + turn) % starts.diff()).to(device)


def _next_draw(memory: CompressorMemory) -> int:
    draw: int = memory.get("draw", 0)
    memory.put("draw", draw + 1)
    return draw


def _values(x: Tensor, places: Tensor) -> Tensor:
    """The numbers of `x` at `places`, in fp32; none of them finite where `x` is not."""
    return x.index_select(0, places).to(torch.float32).add_((x.sum() * 0).to(torch.float32))


def _message(draw: int, values: Tensor) -> Tensor:
    head = torch.tensor([draw], device=values.device)
    return torch.cat([head.view(torch.uint8), values.view(torch.uint8)])
