"""What MXNet's KVStore does, in numpy, for all workers and devices at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Arrays = list[np.ndarray]
Compress = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""What a receiver gets of a gradient; changes the residual."""


class Reference:
    """The values of a store, whose workers and devices push together.

    Args:
        update: ``update(received, stored)`` changes `stored`; None: what is received replaces it.
        compress: of each worker's sum, or of each device's array with `per_device`.
    """

    def __init__(
        self,
        initial: np.ndarray,
        update: Callable[[np.ndarray, np.ndarray], None] | None = None,
        compress: Compress | None = None,
        per_device: bool = False,
    ) -> None:
        self.value, self._update = initial.copy(), update
        self._compress, self._per_device = compress, per_device
        self._residuals: dict[tuple[int, int], np.ndarray] = {}

    def push(self, of_workers: list[Arrays]) -> None:
        """A push of each worker, of its devices' arrays."""
        sums = []
        for worker, arrays in enumerate(of_workers):
            if self._per_device:
                arrays = [self._sent((worker, device), x) for device, x in enumerate(arrays)]
            total = arrays[0].copy()
            for x in arrays[1:]:
                total += x
            sums.append(total if self._per_device else self._sent((worker, 0), total))
        total = sums[0]
        for x in sums[1:]:
            total = total + x
        if self._update is None:
            self.value[...] = total
        else:
            self._update(total, self.value)

    def _sent(self, sender: tuple[int, int], gradient: np.ndarray) -> np.ndarray:
        if self._compress is None:
            return gradient
        return self._compress(gradient, self._residuals.setdefault(sender, np.zeros_like(gradient)))


def two_bit(threshold: float) -> Compress:
    """Of numbers of fp32: t from t on, -t up to -t, else 0."""
    t = np.float32(threshold)

    def compress(gradient: np.ndarray, residual: np.ndarray) -> np.ndarray:
        residual += gradient
        sent = np.zeros_like(residual)
        for i, r in np.ndenumerate(residual):
            if r >= t:
                sent[i] = t
            elif r <= -t:
                sent[i] = -t
        residual -= sent
        return sent

    return compress


def one_bit(threshold: float) -> Compress:
    """1 above the threshold, else -1."""
    t = np.float32(threshold)

    def compress(gradient: np.ndarray, residual: np.ndarray) -> np.ndarray:
        residual += gradient
        sent = np.full_like(residual, -1)
        for i, r in np.ndenumerate(residual):
            if r > t:
                sent[i] = 1
        residual -= sent
        return sent

    return compress


def sgd(lr: float, momentum: float) -> Callable[[np.ndarray, np.ndarray], None]:
    """SGD with momentum, at a constant learning rate."""
    velocity: list[np.ndarray] = []

    def update(gradient: np.ndarray, weight: np.ndarray) -> None:
        velocity[:] = [momentum * velocity[0] + gradient if velocity else gradient.copy()]
        weight -= lr * velocity[0]

    return update
