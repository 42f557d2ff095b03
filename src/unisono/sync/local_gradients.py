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
    gradients_only = True

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.begin()

    def begin(self) -> None:
        self._control: list[float] = []
        self._offered: dict[str, Tensor] = {}

    def close(self, control: list[float], weight: float = 1.0) -> None:
        self._control = control

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        mine = gradient if weight == 1.0 else gradient * weight
        if name in self._offered:
            self._offered[name] = self._offered[name] + mine  # either may be sparse
        else:
            self._offered[name] = mine

    def settle(self) -> LocalMean:
        return LocalMean(self._parameters, self._control, self._offered)


class LocalMean:
    """The mean gradient of one replica; a `PendingUpdate`.

    Args:
        offered: the gradients by name; empty: they are in the parameters.
    """

    agreed = True

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], control: list[float], offered: Mapping[str, Tensor]
    ) -> None:
        self._parameters, self.control = parameters, control
        self._offered, self._written = dict(offered), False

    def norm(self, without: Collection[str] = ()) -> float:
        gradients = self._offered or {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        counted = [gradient for name, gradient in gradients.items() if name not in without]
        if not counted:
            return 0.0
        dense = [g.coalesce().values() if g.is_sparse else g for g in counted]
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(dense)).double()))

    def write(self, scale: float = 1.0) -> None:
        self._written = True
        if scale != 1.0:
            held = (p.grad for p in self._parameters.values() if p.grad is not None)
            for gradient in self._offered.values() or held:
                gradient.mul_(scale)
        for name, gradient in self._offered.items():
            parameter = self._parameters[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient  # either may be sparse
        self._offered.clear()  # so that a reference to this update does not keep the gradients in memory

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        if self._written:
            return step()
        self.write(scale)
        try:
            return step()
        finally:
            for parameter in self._parameters.values():
                parameter.grad = None
