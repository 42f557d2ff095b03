"""The outer optimizer: how the weights that replicas agree on move, once their walks are averaged.

The *outer gradient* is ``g = anchor - mean over replicas of theta``: minus the mean walk. These are values; what they
remember, a velocity of the anchor's shape, is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Outer(Protocol):
    """A rule for the anchor, applied to flat tensors of any shape."""

    @property
    def remembers(self) -> bool:
        """Whether there is a velocity, zero at first."""

    def move(self, anchor: Tensor, gradient: Tensor, velocity: Tensor | None) -> None:
        """Write into `anchor`, and into `velocity` where it `remembers`; `gradient` is only read."""


@dataclass(frozen=True)
class Average:
    """``anchor <- anchor - g``, which is the mean of the replicas' weights (McMahan et al. 2017, algorithm 1)."""

    @property
    def remembers(self) -> bool:
        return False

    def move(self, anchor: Tensor, gradient: Tensor, velocity: Tensor | None) -> None:
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
    def remembers(self) -> bool:
        return self.momentum > 0

    def move(self, anchor: Tensor, gradient: Tensor, velocity: Tensor | None) -> None:
        if velocity is not None:
            gradient = velocity.mul_(self.momentum).add_(gradient)
        anchor.add_(gradient, alpha=-self.lr)


@dataclass(frozen=True)
class Nesterov(Momentum):
    """``v <- momentum v + g``, ``anchor <- anchor - lr (g + momentum v)`` (Sutskever et al. 2013, in torch's form)."""

    lr: float = 0.7

    def move(self, anchor: Tensor, gradient: Tensor, velocity: Tensor | None) -> None:
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
