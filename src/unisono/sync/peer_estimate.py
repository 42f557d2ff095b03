"""What one worker holds of another's weights. Where a compressor loses something, only differences travel.

Both ends of a directed edge keep the same likeness, which starts as weights that both know (Koloskova et al. 2019,
"Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication", algorithm 2)::

    sender      d = x - held        sends C(d), scale        held = held + scale * C(d)
    receiver                                                 held = held + scale * C(d)

What is left out of a message is in the next difference again, so nothing is owed. `scale` makes ``|d - scale * C(d)|``
least, with which any compressor brings `held` nearer to x; the part of ``|d|^2`` that arrives is then the *fidelity*,
``<d, C(d)>^2 / (|d|^2 |C(d)|^2)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.compress import CompressorMemory
from unisono.sync.buckets import Cut

_ALIGN = 16  # bytes: where a message of any dtype may begin


class PeerEstimate:
    """One end of a directed edge: a sender calls `send`, its receiver `take`, in the same order.

    Args:
        start: weights that both ends know, one flat tensor per bucket.

    Attributes:
        held: what the receiver holds after the last letter, to be read only and before `release`.
        fidelity: of the last letter, per bucket; 1 where nothing was lost.
    """

    def __init__(self, cuts: Sequence[Cut], start: Sequence[Tensor]) -> None:
        self._buckets = [_Bucket(plan, x) for plan, x in zip(cuts, start)]
        self.fidelity = [1.0] * len(cuts)

    @property
    def held(self) -> list[Tensor]:
        return [bucket.held for bucket in self._buckets]

    def release(self) -> None:
        """Let go what is not needed for the next letter: all of what keeps bits."""
        for bucket in self._buckets:
            bucket.release()

    def send(self, xs: Sequence[Tensor], note: Sequence[float]) -> Tensor:
        """A letter for the weights `xs`, uint8, with `note`; what keeps bits refers to `xs` until `release`."""
        messages = [bucket.send(x) for bucket, x in zip(self._buckets, xs)]
        self.fidelity = [bucket.fidelity for bucket in self._buckets]
        numbers = [*(bucket.scale for bucket in self._buckets), *self.fidelity, *note]
        return torch.cat([_padded(part) for part in [messages[0].new_tensor(numbers, dtype=torch.float64), *messages]])

    def take(self, letter: Tensor) -> list[float]:
        """Take up a letter; returns its note. What keeps bits refers to `letter` until `release`.

        Raises:
            ValueError: a letter that `send` cannot have made.
        """
        blanks = [_blank(bucket.plan) for bucket in self._buckets]
        lengths = [0, *(_up(blank.nbytes) for blank in blanks)]
        lengths[0] = letter.numel() - sum(lengths)
        if letter.dtype != torch.uint8 or lengths[0] < 16 * len(blanks):
            raise ValueError(f"a letter of {letter.numel()} x {letter.dtype} is none for these weights")
        first, *rest = letter.split(lengths)
        numbers: list[float] = first.view(torch.float64).tolist()
        self.fidelity = numbers[len(blanks) : 2 * len(blanks)]
        for bucket, blank, scale, part in zip(self._buckets, blanks, numbers, rest):
            bucket.take(part[: blank.nbytes].view(blank.dtype), scale)
        return numbers[2 * len(blanks) :]


class _Bucket:
    """One bucket of a likeness."""

    def __init__(self, plan: Cut, start: Tensor) -> None:
        self.plan, self._memory = plan, CompressorMemory()
        self._keeps = plan.compress.keeps(plan.dtype)
        self.held = start[:0] if self._keeps else start.clone()
        self.scale = self.fidelity = 1.0

    def send(self, x: Tensor) -> Tensor:
        if self._keeps:
            self.held = x
            return x
        compress = self.plan.compress
        difference = x - self.held
        total = torch.empty_like(x, dtype=compress.total_dtype(x.dtype))
        compress.add(total, difference, 1.0, True)
        message = compress.encode(total, self.plan.spans, self._memory)
        self._memory.commit()
        arrives = self._decode(message)
        self.scale, self.fidelity = fit(difference, arrives)
        self.held.add_(arrives, alpha=self.scale)
        return message

    def release(self) -> None:
        if self._keeps:
            self.held = self.held[:0].clone()

    def take(self, message: Tensor, scale: float) -> None:
        if self._keeps:
            self.held = message
        else:
            self.held.add_(self._decode(message), alpha=scale)

    def _decode(self, message: Tensor) -> Tensor:
        plan = self.plan
        dtype = plan.compress.total_dtype(plan.dtype)
        return plan.compress.value(plan.compress.decode(message, plan.spans, plan.numel, dtype), plan.dtype)


def fit(x: Tensor, y: Tensor) -> tuple[float, float]:
    """The s for which ``|x - s * y|`` is least, and which part of ``|x|^2`` is then in ``s * y``."""
    x, y = x.float(), y.float()
    xx, xy, yy = float(x.dot(x)), float(x.dot(y)), float(y.dot(y))
    if not xx:
        return 0.0, 1.0
    return (xy / yy, min(1.0, xy * xy / xx / yy)) if yy else (0.0, 0.0)


def gamma(fidelity: float, turns: int = 1) -> float:
    """How far to go by a likeness, as a part of the way that its original would allow; 1 where nothing is lost.

    Args:
        fidelity: f, the part that letters carry. A number is then seen anew in one of 1/f letters, and is taken
            meanwhile for what it was; where it is seen at random, the square of its distance changes each time by
            ``1 - 2 r + 2 r^2``, r = gamma * (an eigenvalue of 1 - W, at most 2) / f. So f / 2 never enlarges it.
        turns: how many edges take turns, each of them as stale.
    """
    return fidelity / (fidelity + 2 * turns * (1 - fidelity)) if fidelity else 0.0


def letter_bytes(cuts: Sequence[Cut], note: int) -> int:
    """The length of a letter with a note of so many numbers, whatever it says."""
    return _up(8 * (2 * len(cuts) + note)) + sum(_up(_blank(plan).nbytes) for plan in cuts)


def _blank(plan: Cut) -> Tensor:
    """What a message looks like."""
    if plan.compress.keeps(plan.dtype):
        return torch.empty(plan.numel, dtype=plan.dtype, device="meta")
    return plan.compress.blank(plan.spans, plan.numel, plan.dtype, torch.device("meta"))


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _padded(part: Tensor) -> Tensor:
    flat = part.view(torch.uint8)
    missing = _up(flat.numel()) - flat.numel()
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
