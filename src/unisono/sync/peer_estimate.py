"""One worker's estimate of another worker's weights. With a lossy compressor, only differences are sent.

Both ends of a directed edge have the same estimate x̂, which starts from weights that both know (Koloskova et al. 2019,
"Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication", CHOCO-SGD, algorithm 2)::

    sender      d = x - x̂        sends C(d), scale        x̂ = x̂ + scale * C(d)
    receiver                                              x̂ = x̂ + scale * C(d)

What a message leaves out is part of the next difference, so there is no residual. `scale` minimizes
``|d - scale * C(d)|``, so that any compressor brings x̂ closer to x. The *fidelity* is the fraction of ``|d|^2`` that
the receiver gets, ``<d, C(d)>^2 / (|d|^2 |C(d)|^2)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.compress import CompressorMemory
from unisono.sync.buckets import BucketPlan

_ALIGN = 16  # bytes: where a message of any dtype may begin


class PeerEstimate:
    """The estimate at one end of a directed edge: the sender calls `send`, the receiver `receive`, in the same order.

    Args:
        start: the weights that both ends know at the beginning, one flat tensor per bucket.

    Attributes:
        estimates: x̂ of each bucket after the last message; read-only, and valid until `release`.
        fidelity: the fidelity of the last message for each bucket; 1 if the compressor is lossless.
    """

    def __init__(self, plans: Sequence[BucketPlan], start: Sequence[Tensor]) -> None:
        self._buckets = [_Bucket(plan, x) for plan, x in zip(plans, start)]
        self.fidelity = [1.0] * len(plans)

    @property
    def estimates(self) -> list[Tensor]:
        return [bucket.estimate for bucket in self._buckets]

    def release(self) -> None:
        """Free the estimates that the next message does not need, which are those with lossless compressors."""
        for bucket in self._buckets:
            bucket.release()

    def send(self, xs: Sequence[Tensor], note: Sequence[float]) -> Tensor:
        """Return the message, uint8, from which the receiver estimates the weights `xs`; it contains `note` too.

        With a lossless compressor, the estimate here is `xs` itself until `release`.
        """
        messages = [bucket.send(x) for bucket, x in zip(self._buckets, xs)]
        self.fidelity = [bucket.fidelity for bucket in self._buckets]
        numbers = [*(bucket.scale for bucket in self._buckets), *self.fidelity, *note]
        return torch.cat([_padded(part) for part in [messages[0].new_tensor(numbers, dtype=torch.float64), *messages]])

    def receive(self, message: Tensor) -> list[float]:
        """Update the estimate by `message`, and return its note.

        With a lossless compressor, the estimate is a view of `message` until `release`.

        Raises:
            ValueError: `send` cannot have made `message`.
        """
        blanks = [_blank(bucket.plan) for bucket in self._buckets]
        lengths = [0, *(_aligned(blank.nbytes) for blank in blanks)]
        lengths[0] = message.numel() - sum(lengths)
        if message.dtype != torch.uint8 or lengths[0] < 16 * len(blanks):
            raise ValueError(
                f"a message of {message.numel()} x {message.dtype} does not fit these weights: at least "
                f"{sum(lengths[1:]) + 16 * len(blanks)} x torch.uint8 are expected"
            )
        first, *rest = message.split(lengths)
        numbers: list[float] = first.view(torch.float64).tolist()
        self.fidelity = numbers[len(blanks) : 2 * len(blanks)]
        for bucket, blank, scale, part in zip(self._buckets, blanks, numbers, rest):
            bucket.receive(part[: blank.nbytes].view(blank.dtype), scale)
        return numbers[2 * len(blanks) :]


class _Bucket:
    """The estimate of one bucket."""

    def __init__(self, plan: BucketPlan, start: Tensor) -> None:
        self.plan, self._memory = plan, CompressorMemory()
        self._lossless = plan.compress.is_lossless(plan.dtype)
        self.estimate = start[:0] if self._lossless else start.clone()
        self.scale = self.fidelity = 1.0

    def send(self, x: Tensor) -> Tensor:
        if self._lossless:
            self.estimate = x
            return x
        compress = self.plan.compress
        difference = x - self.estimate
        total = torch.empty_like(x, dtype=compress.total_dtype(x.dtype))
        compress.add(total, difference, 1.0, True)
        message = compress.encode(total, self.plan.spans, self._memory)
        self._memory.commit()
        decoded = self._decode(message)
        self.scale, self.fidelity = fit(difference, decoded)
        self.estimate.add_(decoded, alpha=self.scale)
        return message

    def release(self) -> None:
        if self._lossless:
            self.estimate = self.estimate[:0].clone()

    def receive(self, message: Tensor, scale: float) -> None:
        if self._lossless:
            self.estimate = message
        else:
            self.estimate.add_(self._decode(message), alpha=scale)

    def _decode(self, message: Tensor) -> Tensor:
        plan = self.plan
        dtype = plan.compress.total_dtype(plan.dtype)
        return plan.compress.value(plan.compress.decode(message, plan.spans, plan.numel, dtype), plan.dtype)


def fit(x: Tensor, y: Tensor) -> tuple[float, float]:
    """The s that minimizes ``|x - s * y|``, and the fraction of ``|x|^2`` that is then in ``s * y``."""
    x, y = x.float(), y.float()
    xx, xy, yy = float(x.dot(x)), float(x.dot(y)), float(y.dot(y))
    if not xx:
        return 0.0, 1.0
    return (xy / yy, min(1.0, xy * xy / xx / yy)) if yy else (0.0, 0.0)


def gamma(fidelity: float, edges: int = 1) -> float:
    """The factor by which mixing with estimates is damped; 1 if the estimates are exact.

    Args:
        fidelity: f, the fraction that messages carry. A number is then updated in one of 1/f messages, and keeps its
            old estimate meanwhile. If updates are random, its squared distance changes in each step by the factor
            ``1 - 2 r + 2 r^2``, with r = gamma * (an eigenvalue of 1 - W, at most 2) / f. So gamma = f / 2 never
            increases the distance.
        edges: the number of edges that are used in cyclic order; so the estimate of an edge is that many steps old.
    """
    return fidelity / (fidelity + 2 * edges * (1 - fidelity)) if fidelity else 0.0


def message_bytes(plans: Sequence[BucketPlan], note: int) -> int:
    """The size in bytes of a message whose note has `note` numbers. It does not depend on the content."""
    return _aligned(8 * (2 * len(plans) + note)) + sum(_aligned(_blank(plan).nbytes) for plan in plans)


def _blank(plan: BucketPlan) -> Tensor:
    """An empty message of one bucket, on the meta device."""
    if plan.compress.is_lossless(plan.dtype):
        return torch.empty(plan.numel, dtype=plan.dtype, device="meta")
    return plan.compress.blank(plan.spans, plan.numel, plan.dtype, torch.device("meta"))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _padded(part: Tensor) -> Tensor:
    flat = part.view(torch.uint8)
    missing = _aligned(flat.numel()) - flat.numel()
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
