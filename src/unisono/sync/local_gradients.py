"""The mean gradient of one worker: of a single replica, or of a local step.

Gradients may stay where autograd accumulates them, which saves a pass over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unisono.sync.synchronizer import BoundSynchronizer


class LocalGradients(BoundSynchronizer):
    """The synchronizer of a replica that takes local steps.

    The caller either weights the losses before backward, so that autograd accumulates the mean gradient, or offers
    gradients, which this class accumulates.
    """

    local_gradients = True

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.begin()

    def begin(self) -> None:
        self._control: list[float] = []
        self._offered: dict[str, Tensor] = {}
        for parameter in self._parameters.values():
            parameter.grad = None

    def close(self, control: list[float], weight: float = 1.0) -> None:
        self._control = control

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        mine = gradient if weight == 1.0 else gradient * weight
        if name in self._offered:
            self._offered[name] = self._offered[name] + mine  # either may be sparse
        else:
            self._offered[name] = mine

    def settle(self) -> LocalMean:
        for name, gradient in self._offered.items():
            self._parameters[name].grad = gradient
        return LocalMean(self._parameters, self._control)


class LocalMean:
    """The mean gradient of one replica; a `PendingUpdate`."""

    agreed = True

    def __init__(self, parameters: Mapping[str, nn.Parameter], control: list[float]) -> None:
        self._parameters, self.control = parameters, control
        self._gradients = [p.grad for p in parameters.values() if p.grad is not None]

    def norm(self, without: Collection[str] = ()) -> float:
        counted = [p.grad for name, p in self._parameters.items() if p.grad is not None and name not in without]
        if not counted:
            return 0.0
        dense = [g.coalesce().values() if g.is_sparse else g for g in counted]
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(dense)).double()))

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Scale the gradients in place, and step."""
        if scale != 1.0:
            for gradient in self._gradients:
                gradient.mul_(scale)
        self._gradients.clear()  # so that a reference to this update does not keep the gradients in memory
        return step()
