"""Weight deltas: compressed differences that are sent to workers in place of weights.

    weights                w0 ─────────► w1 ─────────► w2            (the optimizer's, never sent)
                            │ encode      │ encode
    weights on workers     e0 ── m1 ───► e1 ── m2 ───► e2            (the shadow; a worker at e0 receives m1 and m2)

Workers with the same delta number have the same bits, so the server keeps no state per worker. What a message leaves
out is part of the next difference. A worker receives the shadow instead if the messages that it lacks are larger.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.compress import Compressor, CompressorMemory, Span, bits


def saves_bytes(compress: Compressor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> bool:
    """Whether a message of `compress` is smaller than the weights themselves."""
    return bits(compress, spans, numel, dtype) < numel * dtype.itemsize * 8


def decoded(compress: Compressor, message: Tensor, spans: Sequence[Span], numel: int, dtype: torch.dtype) -> Tensor:
    """The difference that `message` represents."""
    return compress.value(compress.decode(message, spans, numel, dtype), dtype)


class WeightDeltas:
    """The shadow of one slice's weights, and the messages that led to it.

    Attributes:
        number: the number of the shadow, from 0. Each delta and each exact shadow adds 1.
        shadow: the weights of workers that have received all deltas.
    """

    def __init__(self, compress: Compressor, spans: Sequence[Span], weights: Tensor) -> None:
        self._compress, self._spans = compress, spans
        self.number, self.shadow = 0, weights.clone()
        self._memory = CompressorMemory()
        self._messages: deque[Tensor] = deque()  # the last one led to the shadow
        self._nbytes = 0
        self._exact = True

    def publish(self, weights: Tensor) -> None:
        """Add a delta that brings the shadow closer to `weights`."""
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
        """Make `weights` the shadow exactly, under a new number, without a message."""
        if not self._exact or not torch.equal(self.shadow, weights):
            self.shadow.copy_(weights)
            self.number, self._exact, self._nbytes = self.number + 1, True, 0
            self._messages.clear()

    def since(self, delta_number: int) -> list[Tensor] | None:
        """The messages that lead from the weights of `delta_number` to the shadow; None: send the shadow itself."""
        behind = self.number - delta_number
        return list(self._messages)[len(self._messages) - behind :] if 0 <= behind <= len(self._messages) else None
