"""Send only the numbers of the largest magnitude, and owe the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unisono.compress import index_coding as places
from unisono.compress.compressor import Codec, CollectiveVerbs, Mean
from unisono.compress.memory import CompressorMemory, accumulated
from unisono.compress.span import Span

_VALUES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_LARGEST_FP8 = 448.0
_EXACT_BELOW = 1 << 14  # numbers, where sorting costs less than sampling
_HITS = 64  # how many of a sample are to be among the largest
_CHUNK = 1 << 18  # numbers that stay in a core's cache from one operation to the next


@dataclass(frozen=True)
class TopK(Codec):
    """Deep Gradient Compression (Lin et al. 2018): of `n` numbers the ``density * n`` of the largest magnitude travel.

    What did not travel is added up until it is large enough. With `momentum` m, gradient g and what has added up v::

        u = m * u + g        v = v + u        send the largest of v        v = v - sent        u = 0 where sent

    (eq. 4 and algorithm 4), which corrects momentum for the delay; the optimizer then has to have none of its own.
    With ``masking=False`` u stays, and ``density=1`` is momentum SGD to the bit.

    A message holds packed indices and the values, as `values` says: ``fp8`` (e4m3, 3 bits of mantissa, one scale for
    all), ``bf16`` or ``fp32``. What rounding loses is owed like the rest, so that the narrowest costs no accuracy.
    The largest are found by a threshold that a sample gives (section 5), in one pass.

    `mean` gathers everybody's message; each worker adds them up in the order of ranks, so that all get the same bits.
    There, `clip` bounds the 2-norm of what a bucket adds to u by ``clip / sqrt(workers)`` (section 3.2), and for the
    first `warm_up` steps the density falls exponentially from 25 % (section 3.3). Elsewhere (server, gossip) `clip`
    holds as it is and there is no warm-up, because the length of a message must not depend on the step.

    Args:
        density: part of the numbers that travels.
        momentum: m, of the correction; 0 has none.
        clip: 2-norm at which the gradient is clipped before anything is added; None does not.
        warm_up: steps until `density` is reached.
        masking: whether u is forgotten where v was sent ("momentum factor masking").
        values: type in which values travel.

    Raises:
        ValueError: `density` outside (0, 1], `momentum` outside [0, 1), `clip` not above 0, `warm_up` below 0,
            `values` none of fp8, bf16, fp32.
    """

    density: float = 0.01
    momentum: float = 0.0
    clip: float | None = None
    warm_up: int = 0
    masking: bool = True
    values: str = "fp8"

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density={self.density!r} is not above 0 and at most 1")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum!r} is not from 0 to below 1")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"clip={self.clip!r} is not a number above 0")
        if not isinstance(self.warm_up, int) or self.warm_up < 0:
            raise ValueError(f"warm_up={self.warm_up!r} is not a whole number from 0")
        if self.values not in _VALUES:
            raise ValueError(f"values={self.values!r} is none of {', '.join(_VALUES)}")

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)  # small gradients would vanish in a 16-bit sum

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(self._bytes(count(self.density, numel), numel), dtype=torch.uint8, device=device)

    def encode(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        total = total.to(self.total_dtype(total.dtype))
        return self._pack(total, largest(total, count(self.density, total.numel())))[0]

    def owe(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        return self._owe(total, memory, self.density, self.clip)

    def decode(self, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
        indices, values = self._unpack(message, count(self.density, numel), numel)
        return torch.zeros(numel, dtype=dtype, device=message.device).index_copy_(0, indices, values.to(dtype))

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        step = memory.get("step", 0)
        memory.put("step", min(step + 1, self.warm_up))
        density = self._density(step)
        clip = None if self.clip is None else self.clip / math.sqrt(comm.size)
        messages = yield comm.gather(self._owe(total, memory, density, clip))
        summed = total.zero_()
        for message in messages:
            indices, values = self._unpack(message, count(density, total.numel()), total.numel())
            summed.index_add_(0, indices, values.to(total.dtype))
        return self.value(summed, dtype)

    def _density(self, step: int) -> float:
        if step >= self.warm_up:
            return self.density
        first = max(0.25, self.density)
        return float(first * (self.density / first) ** (step / self.warm_up))

    def _owe(self, total: Tensor, memory: CompressorMemory, density: float, clip: float | None) -> Tensor:
        if clip is not None:
            total.mul_((clip / total.norm()).clamp_(max=1.0))
        if self.momentum:
            total = accumulated(total, memory, "velocity", self.momentum)
        owed = accumulated(total, memory, "owed")
        indices = largest(owed, count(density, total.numel()))
        message, sent = self._pack(owed, indices)
        # What is not finite has been sent and is seen; kept, it would never go away.
        left = (owed.index_select(0, indices) - sent.to(owed.dtype)).nan_to_num_(0.0, 0.0, 0.0)
        owed.index_copy_(0, indices, left)
        if self.momentum and self.masking:
            total.index_fill_(0, indices, 0.0)
        return message

    def _bytes(self, k: int, numel: int) -> int:
        scale = 4 if self.values == "fp8" and k else 0
        return scale + k * _VALUES[self.values].itemsize + places.packed_bytes(k, numel)

    def _pack(self, x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The message for the numbers of `x` at `indices`, and their values as they will arrive."""
        values = x.index_select(0, indices).to(torch.float32)  # ten times as fast as x[indices]
        packed = places.pack(indices, x.numel())
        if self.values != "fp8" or not indices.numel():
            kept = values.to(_VALUES[self.values])
            return torch.cat([kept.view(torch.uint8), packed]), kept.to(torch.float32)
        finite = values.nan_to_num(0.0, 0.0, 0.0).abs().amax()
        scale = (finite / _LARGEST_FP8).clamp_(min=torch.finfo(torch.float32).tiny).view(1)
        known = values.masked_fill(values.isfinite().logical_not_(), math.nan)  # fp8 has no infinity
        kept = (known / scale).to(torch.float8_e4m3fn)
        return torch.cat([scale.view(torch.uint8), kept.view(torch.uint8), packed]), kept.to(torch.float32) * scale

    def _unpack(self, message: Tensor, k: int, numel: int) -> tuple[Tensor, Tensor]:
        """Indices and values of a message of `k` numbers out of `numel`.

        Raises:
            ValueError: a message that `_pack` cannot have made.
        """
        length = self._bytes(k, numel)
        if message.dtype != torch.uint8 or message.shape != (length,):
            raise ValueError(f"a message of {tuple(message.shape)} {message.dtype} is not one of {length} bytes")
        end = length - places.packed_bytes(k, numel)
        start = end - k * _VALUES[self.values].itemsize
        values = message[start:end].clone().view(_VALUES[self.values]).to(torch.float32)
        if start:
            scale = message[:start].clone().view(torch.float32)
            if not 0 < float(scale) < math.inf:
                raise ValueError(f"a scale of {float(scale):g} is not a number above 0")
            values.mul_(scale)
        return places.unpack(message[end:], k, numel), values


def count(density: float, numel: int) -> int:
    """How many of `numel` numbers travel: at least one, if there is one."""
    return min(numel, max(1, round(density * numel)))


def largest(x: Tensor, k: int) -> Tensor:
    """Indices, increasing, of `k` numbers of the largest magnitude in the flat `x`; what is not a number is largest."""
    n = x.numel()
    if k == n:
        return torch.arange(n, device=x.device)
    if n <= _EXACT_BELOW or k <= _HITS:
        return x.abs().topk(k, sorted=False).indices.sort().values
    found = _candidates(x, k)
    if found.numel() <= k:
        return _filled(found, k, n)
    keep = torch.zeros(found.numel(), dtype=torch.bool, device=x.device)
    keep.index_fill_(0, x.index_select(0, found).abs().topk(k, sorted=False).indices, True)
    return found.index_select(0, places.where(keep))


def _candidates(x: Tensor, k: int) -> Tensor:
    """Indices of at least `k` numbers: all above a threshold which a sample says a few more than `k` pass (Lin et al.
    2018, section 5). Fewer only where all others are zero."""
    stride = max(1, int(k / _HITS)) | 1  # odd, lest of rows of even length only some columns be seen
    sample = x[::stride].abs()
    rank = int(_HITS + 2.5 * math.sqrt(_HITS))  # 2.5 standard deviations more, so that seldom fewer than k pass
    found, threshold = x.new_empty(0), math.inf
    while found.numel() < k and threshold != 0:
        threshold = float(sample.topk(rank, sorted=False).values.amin()) if rank < sample.numel() else 0.0
        found = _above(x, threshold)
        rank *= 4
    return found


def _above(x: Tensor, threshold: float) -> Tensor:
    """Indices, increasing, where the magnitude of `x` is above `threshold` or not a number."""
    if x.device.type != "cpu":
        return places.where((x.abs() <= threshold).logical_not_())
    # numpy compares and lists several times faster than torch does on a CPU.
    found = []
    for start in range(0, x.numel(), _CHUNK):
        below = np.less_equal(x[start : start + _CHUNK].abs().numpy(), threshold)
        found.append(np.flatnonzero(np.logical_not(below, out=below)) + start)
    return torch.from_numpy(np.concatenate(found))


def _filled(found: Tensor, k: int, n: int) -> Tensor:
    """`found`, increasing, and the first others below `n`, so that they are `k`."""
    if found.numel() == k:
        return found
    taken = torch.zeros(k, dtype=torch.bool, device=found.device)
    taken[found[found < k]] = True
    others = places.where(taken.logical_not_())[: k - found.numel()]
    return torch.cat([found, others]).sort().values
