"""One replica with nobody to agree with: the gradients stay where autograd puts them.

A bound synchronizer as any other, for a compressor that keeps what it is given; it saves a pass over all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class LocalGradients:
    """`BoundSynchronizer` of a lone replica whose losses are weighted before their backward pass, so that what
    autograd adds up is the mean; nothing is offered."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._control: list[float] = []

    def begin(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def close(self, control: list[float]) -> None:
        self._control = control

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        raise AssertionError(f"{name}: gradients of a lone replica stay with autograd")

    def settle(self) -> LocalMean:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        return LocalMean(gradients, self._control)

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        pass


class LocalMean:
    """The mean gradient of a lone replica; see `Change`."""

    def __init__(self, gradients: list[Tensor], control: list[float]) -> None:
        self._gradients, self.control = gradients, control

    def norm(self) -> float:
        """The 2-norm over all parameters."""
        if not self._gradients:
            return 0.0
        dense = [g.coalesce().values() if g.is_sparse else g for g in self._gradients]
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(dense)).double()))

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Scale the gradients where they are and step."""
        if scale != 1.0:
            for gradient in self._gradients:
                gradient.mul_(scale)
        return step()
