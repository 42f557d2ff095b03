"""A compressor that sends the elements of largest magnitude of a gradient, with error feedback."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unisono.compress import index_coding as index_coding
from unisono.compress.compressor import Codec, CollectiveVerbs, Mean
from unisono.compress.memory import RESIDUAL, CompressorMemory, accumulated
from unisono.compress.span import Span

_VALUES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_LARGEST_FP8 = 448.0
_EXACT_BELOW = 1 << 14  # numbers for which sorting is faster than sampling
_HITS = 64  # the expected number of elements of a sample that are among the largest
_CHUNK = 1 << 18  # numbers that stay in a core's cache from one operation to the next


@dataclass(frozen=True)
class TopK(Codec):
    """Deep Gradient Compression (Lin et al. 2018): sends the ``density * n`` of n numbers with the largest magnitude.

    Other numbers are accumulated until they are large enough. With `momentum` m, gradient g and residual v::

        u = m * u + g        v = v + u        send the largest of v        v = v - sent        u = 0 where sent

    (eq. 4 and algorithm 4), which corrects momentum for the delay; use an optimizer without momentum then. With
    ``masking=False``, u is not reset, and ``density=1`` has the bits of momentum SGD.

    A message contains packed indices, and the values as ``fp8`` (e4m3, 3 bits of mantissa, one scale for all), ``bf16``
    or ``fp32``. Rounding errors are part of the residual, so the narrowest type costs no accuracy. The largest numbers
    are found in one pass, by a threshold that is estimated from a sample (section 5).

    `mean` gathers all messages; each worker adds them in the order of ranks, so all have the same bits. In `mean`,
    `clip` bounds the 2-norm of what a bucket adds to u by ``clip / sqrt(workers)`` (section 3.2). In the first
    `warm_up` steps, the density decreases exponentially from 25 % (section 3.3). Where `mean` is not used (servers,
    gossip), `clip` is not scaled. There is no warm-up, because the length of a message must not depend on the step.

    Args:
        density: the fraction of the numbers that is sent.
        momentum: m of the momentum correction; 0: no correction.
        clip: the 2-norm to which a gradient is clipped before it is added; None: no clipping.
        warm_up: the number of steps until `density` is reached.
        masking: whether u is reset where v was sent ("momentum factor masking").
        values: the type of the values in a message.

    Raises:
        ValueError: `density` is outside (0, 1], `momentum` outside [0, 1), `clip` not above 0, `warm_up` below 0, or
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
        return torch.promote_types(dtype, torch.float32)  # residuals would be lost by rounding in a 16-bit sum

    def blank(self, spans: Sequence[Span], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(self._bytes(count(self.density, numel), numel), dtype=torch.uint8, device=device)

    def encode(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        total = total.to(self.total_dtype(total.dtype))
        return self._pack(total, largest(total, count(self.density, total.numel())))[0]

    def encode_with_feedback(self, total: Tensor, spans: Sequence[Span], memory: CompressorMemory) -> Tensor:
        return self._encode_density(total, memory, self.density, self.clip)

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
        messages = yield comm.gather(self._encode_density(total, memory, density, clip))
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

    def _encode_density(self, total: Tensor, memory: CompressorMemory, density: float, clip: float | None) -> Tensor:
        if clip is not None:
            total.mul_((clip / total.norm()).clamp_(max=1.0))
        if self.momentum:
            total = accumulated(total, memory, "velocity", self.momentum)
        residual = accumulated(total, memory, RESIDUAL)
        indices = largest(residual, count(density, total.numel()))
        message, sent = self._pack(residual, indices)
        # Numbers that are not finite have been sent; in the residual they would remain for ever.
        left = (residual.index_select(0, indices) - sent.to(residual.dtype)).nan_to_num_(0.0, 0.0, 0.0)
        residual.index_copy_(0, indices, left)
        if self.momentum and self.masking:
            total.index_fill_(0, indices, 0.0)
        return message

    def _bytes(self, k: int, numel: int) -> int:
        scale = 4 if self.values == "fp8" and k else 0
        return scale + k * _VALUES[self.values].itemsize + index_coding.packed_bytes(k, numel)

    def _pack(self, x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The message for the numbers of `x` at `indices`, and these numbers as the receiver will decode them."""
        values = x.index_select(0, indices).to(torch.float32)  # ten times faster than x[indices]
        packed = index_coding.pack(indices, x.numel())
        if self.values != "fp8" or not indices.numel():
            kept = values.to(_VALUES[self.values])
            return torch.cat([kept.view(torch.uint8), packed]), kept.to(torch.float32)
        finite = values.nan_to_num(0.0, 0.0, 0.0).abs().amax()
        scale = (finite / _LARGEST_FP8).clamp_(min=torch.finfo(torch.float32).tiny).view(1)
        encodable = values.masked_fill(values.isfinite().logical_not_(), math.nan)  # fp8 has no infinity
        kept = (encodable / scale).to(torch.float8_e4m3fn)
        return torch.cat([scale.view(torch.uint8), kept.view(torch.uint8), packed]), kept.to(torch.float32) * scale

    def _unpack(self, message: Tensor, k: int, numel: int) -> tuple[Tensor, Tensor]:
        """The indices and values of a message of `k` numbers out of `numel`.

        Raises:
            ValueError: `_pack` cannot have made `message`.
        """
        length = self._bytes(k, numel)
        if message.dtype != torch.uint8 or message.shape != (length,):
            raise ValueError(
                f"a message of {tuple(message.shape)} {message.dtype}, where {length} bytes are expected for {k} of "
                f"{numel} numbers"
            )
        end = length - index_coding.packed_bytes(k, numel)
        start = end - k * _VALUES[self.values].itemsize
        values = message[start:end].clone().view(_VALUES[self.values]).to(torch.float32)
        if start:
            scale = message[:start].clone().view(torch.float32)
            if not 0 < float(scale) < math.inf:
                raise ValueError(f"a message with scale {float(scale):g}, which is not a finite number above 0")
            values.mul_(scale)
        return index_coding.unpack(message[end:], k, numel), values


def count(density: float, numel: int) -> int:
    """How many of `numel` numbers are sent: at least one, if there is one."""
    return min(numel, max(1, round(density * numel)))


def largest(x: Tensor, k: int) -> Tensor:
    """The increasing indices of the `k` numbers of largest magnitude in the flat `x`; NaN is the largest."""
    n = x.numel()
    if k == n:
        return torch.arange(n, device=x.device)
    if n <= _EXACT_BELOW or k <= _HITS:
        return x.abs().topk(k, sorted=False).indices.sort().values
    candidates = _candidates(x, k)
    if candidates.numel() <= k:
        return _filled(candidates, k, n)
    keep = torch.zeros(candidates.numel(), dtype=torch.bool, device=x.device)
    keep.index_fill_(0, x.index_select(0, candidates).abs().topk(k, sorted=False).indices, True)
    return candidates.index_select(0, index_coding.true_indices(keep))


def _candidates(x: Tensor, k: int) -> Tensor:
    """The indices of at least `k` numbers: all above a threshold estimated from a sample (Lin et al. 2018, section 5).

    Fewer than `k` are returned only if all other numbers are 0.
    """
    stride = max(1, int(k / _HITS)) | 1  # odd, so that a sample of a matrix with an even row length has all columns
    sample = x[::stride].abs()
    rank = int(_HITS + 2.5 * math.sqrt(_HITS))  # 2.5 standard deviations more: fewer than k are rarely above
    above, threshold = x.new_empty(0), math.inf
    while above.numel() < k and threshold != 0:
        threshold = float(sample.topk(rank, sorted=False).values.amin()) if rank < sample.numel() else 0.0
        above = _above(x, threshold)
        rank *= 4
    return above


def _above(x: Tensor, threshold: float) -> Tensor:
    """The increasing indices where the magnitude of `x` is above `threshold` or NaN."""
    if x.device.type != "cpu":
        return index_coding.true_indices((x.abs() <= threshold).logical_not_())
    # numpy is several times faster than torch on a CPU here.
    indices = []
    for start in range(0, x.numel(), _CHUNK):
        below = np.less_equal(x[start : start + _CHUNK].abs().numpy(), threshold)
        indices.append(np.flatnonzero(np.logical_not(below, out=below)) + start)
    return torch.from_numpy(np.concatenate(indices))


def _filled(indices: Tensor, k: int, n: int) -> Tensor:
    """The increasing `indices`, filled up to `k` with the first others below `n`."""
    if indices.numel() == k:
        return indices
    taken = torch.zeros(k, dtype=torch.bool, device=indices.device)
    taken[indices[indices < k]] = True
    others = index_coding.true_indices(taken.logical_not_())[: k - indices.numel()]
    return torch.cat([indices, others]).sort().values
