"""Outer optimizers: how the anchor is updated by the mean of local updates.

The *outer gradient* is ``g = anchor - mean over replicas of theta``, the negative mean local update. Outer optimizers
are frozen values; the caller keeps their state, a velocity of the anchor's shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Outer(Protocol):
    """An update rule for the anchor, elementwise on tensors of any shape."""

    @property
    def has_velocity(self) -> bool:
        """Whether the rule has a velocity, which is zero at first."""

    def update(self, anchor: Tensor, gradient: Tensor, velocity: Tensor | None) -> None:
        """Update `anchor` in place, and `velocity` if the rule has one; `gradient` is only read."""


@dataclass(frozen=True)
class Average:
    """``anchor <- anchor - g``: the mean of the replicas' weights (McMahan et al. 2017, algorithm 1)."""

    @property
    def has_velocity(self) -> bool:
        return False

    def update(self, anchor: Tensor, gradient: Tensor, velocity: Tensor | None) -> None:
        anchor.sub_(gradient)


@dataclass(frozen=True)
class Momentum:
    """``v <- momentum v + g``, ``anchor <- anchor - lr v`` (Polyak 1964); without momentum, outer SGD.

    Args:
        lr: outer learning rate, above 0.
        momentum: from 0 to below 1.
    """

    lr: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check(self.lr, self.momentum)

    @property
    def has_velocity(self) -> bool:
        return self.momentum > 0

    def update(self, anchor: Tensor, gradient: Tensor, velocity: Tensor | None) -> None:
        if velocity is not None:
            gradient = velocity.mul_(self.momentum).add_(gradient)
        anchor.add_(gradient, alpha=-self.lr)


@dataclass(frozen=True)
class Nesterov(Momentum):
    """``v <- momentum v + g``, ``anchor <- anchor - lr (g + momentum v)`` (Sutskever et al. 2013, in torch's form)."""

    lr: float = 0.7

    def update(self, anchor: Tensor, gradient: Tensor, velocity: Tensor | None) -> None:
        anchor.add_(gradient, alpha=-self.lr)
        if velocity is not None:
            velocity.mul_(self.momentum).add_(gradient)
            anchor.add_(velocity, alpha=-self.lr * self.momentum)


OUTER: dict[str, type] = {cls.__name__: cls for cls in (Average, Momentum, Nesterov)}


def _check(lr: float, momentum: float) -> None:
    if not isinstance(lr, int | float) or isinstance(lr, bool) or not 0 < lr < float("inf"):
        raise ValueError(f"lr={lr!r} is not a learning rate above 0")
    if not isinstance(momentum, int | float) or isinstance(momentum, bool) or not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum!r} is not a number from 0 to below 1")
