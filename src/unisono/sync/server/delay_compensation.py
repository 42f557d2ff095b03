"""Corrections of stale gradients, which were computed on older weights than the server's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_EPSILON = 1e-7


class Compensation(Protocol):
    """The correction of a stale gradient, as a frozen value; its state is passed in."""

    @property
    def needs_old_weights(self) -> bool:
        """Whether the correction needs the weights on which the gradient was computed."""

    def correct(self, gradient: Tensor, now: Tensor, then: Tensor, staleness: int, state: dict[str, Tensor]) -> Tensor:
        """The corrected gradient, to be applied to the weights `now`. It may be `gradient`, changed in place.

        `gradient` was computed on the weights `then`, which are `staleness` versions older than `now`. `state` is kept
        from one gradient to the next.
        """


@dataclass(frozen=True)
class DelayCompensation:
    """DC-ASGD (Zheng et al. 2017, eq. 10): a first-order correction that approximates the Hessian by outer products::

        g  <-  g + strength * g * g * (weights now - weights then)

    The adaptive form (DC-ASGD-a, eq. 14), in which `strength` may be larger (2 in the paper)::

        s  <-  decay * s + (1 - decay) * g * g        strength  <-  strength / sqrt(s + 1e-7)

    Raises:
        ValueError: `strength` is not a finite number from 0, or `decay` is not from 0 to below 1.
    """

    strength: float = 0.04
    adaptive: bool = False
    decay: float = 0.95

    def __post_init__(self) -> None:
        if not isinstance(self.strength, int | float) or not 0 <= self.strength < math.inf:
            raise ValueError(f"strength={self.strength!r} is not a finite number from 0")
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive={self.adaptive!r} is neither True nor False")
        if not isinstance(self.decay, int | float) or not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay!r} is not a number from 0 to below 1")

    @property
    def needs_old_weights(self) -> bool:
        return True

    def correct(self, gradient: Tensor, now: Tensor, then: Tensor, staleness: int, state: dict[str, Tensor]) -> Tensor:
        square = gradient * gradient
        curvature = square * self.strength
        if self.adaptive:
            if "mean square" not in state:
                state["mean square"] = torch.zeros_like(square)
            mean = state["mean square"].lerp_(square, 1 - self.decay)
            curvature /= (mean + _EPSILON).sqrt_()
        return gradient.addcmul_(curvature, now - then)


@dataclass(frozen=True)
class ScaledByStaleness:
    """Divides the learning rate by the staleness (Zhang et al. 2016, "Staleness-aware async-SGD", eq. 5)."""

    @property
    def needs_old_weights(self) -> bool:
        return False

    def correct(self, gradient: Tensor, now: Tensor, then: Tensor, staleness: int, state: dict[str, Tensor]) -> Tensor:
        return gradient.div_(max(1, staleness))


COMPENSATIONS: dict[str, type] = {cls.__name__: cls for cls in (DelayCompensation, ScaledByStaleness)}
