"""What travels to the workers in place of weights: differences to what they already hold.

    weights                w0 ─────────► w1 ─────────► w2            (the optimizer's, never sent as they are)
                            │ encode      │ encode
    what the workers hold  e0 ── m1 ───► e1 ── m2 ───► e2            (the shadow; a worker at e0 is sent m1 and m2)

All workers at one edition hold the same bits, so nothing is kept per worker; what a message leaves out is part of the
next difference. Who is so far behind that the messages outweigh the whole shadow gets that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.compress import Compressor, CompressorMemory, Span, bits


def pays(compress: Compressor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> bool:
    """Whether a message is smaller than the weights themselves."""
    return bits(compress, spans, numel, dtype) < numel * dtype.itemsize * 8


def decoded(compress: Compressor, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
    """The difference that `message` stands for."""
    return compress.value(compress.decode(message, spans, numel, dtype), dtype)


class WeightDeltas:
    """The shadow of one slice's weights, and the messages that led to it."""

    def __init__(self, compress: Compressor, spans: Sequence[Span], weights: Tensor) -> None:
        self._compress, self._spans = compress, spans
        self.number, self.shadow = 0, weights.clone()
        self._memory = CompressorMemory()
        self._messages: deque[Tensor] = deque()  # the last one led to the shadow
        self._nbytes = 0
        self._exact = True

    def publish(self, weights: Tensor) -> None:
        """A new edition, which comes near to `weights`."""
        total = (weights - self.shadow).to(self._compress.total_dtype(weights.dtype))
        message = self._compress.encode(total, self._spans, self._memory).clone()
        self._memory.commit()
        self.shadow += decoded(self._compress, message, self._spans, weights.numel(), weights.dtype)
        self.number, self._exact = self.number + 1, False
        self._messages.append(message)
        self._nbytes += message.nbytes
        while self._nbytes > weights.nbytes:
            self._nbytes -= self._messages.popleft().nbytes

    def publish_exact(self, weights: Tensor) -> None:
        """A new edition which is `weights`, to the bit."""
        if not self._exact or not torch.equal(self.shadow, weights):
            self.shadow.copy_(weights)
            self.number, self._exact, self._nbytes = self.number + 1, True, 0
            self._messages.clear()

    def since(self, delta_number: int) -> list[Tensor] | None:
        """The messages that lead from `delta_number` to this one; None: only the whole shadow does."""
        behind = self.number - delta_number
        return list(self._messages)[len(self._messages) - behind :] if 0 <= behind <= len(self._messages) else None
