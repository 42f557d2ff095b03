"""Detects that a custom loop has changed weights or hyperparameters on one worker alone.

Before each step of an optimizer, every worker takes a digest of its hyperparameters, and one number of its parameters,
another one each time. They travel in the control word of the next exchange, so they need no message. Numbers of weights
are compared with a tolerance: processors of different kinds round an optimizer's step differently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from unisono.errors import UnisonoError

_MAX_WORKERS = 8
_BITS = 52  # a float64 of the control word holds so many exactly
_TOLERANCE = 1e-3  # relative


class DriftCheck:
    """Compares the first `_MAX_WORKERS` workers.

    Attributes:
        words: the count of numbers that the control word has for it.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, min(size, _MAX_WORKERS) if size > 1 else 0
        self.words = 2 * self._size
        self._steps = 0
        self._optimizer = self._parameter = ""
        self.reset()

    def reset(self) -> None:
        """The steps until now are not compared."""
        self._hyperparameters, self._weight = 0, 0.0

    def before_step(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """An optimizer is about to step.

        Args:
            names: of the parameters by identity; others are not looked at.
        """
        if not self._size:
            return
        self._steps += 1
        numbers = tuple(v for group in optimizer.param_groups for v in group.values() if isinstance(v, int | float))
        self._hyperparameters = hash((self._hyperparameters, self._steps, numbers))
        self._optimizer = type(optimizer).__name__
        parameters = optimizer.param_groups[self._steps % len(optimizer.param_groups)]["params"]
        parameter = parameters[self._steps % len(parameters)] if parameters else None
        if parameter is not None and id(parameter) in names and parameter.numel():
            self._parameter, self._weight = names[id(parameter)], _number(parameter, self._steps)

    def control_word(self) -> list[float]:
        """This worker's digests at its rank, and 0 at all others."""
        mine = (1.0 + (self._hyperparameters & ((1 << _BITS) - 1)), self._weight)
        return [value for rank in range(self._size) for value in (mine if rank == self._rank else (0.0, 0.0))]

    def compare(self, digests: Sequence[float]) -> None:
        """Compare the digests of all workers from one control word, and begin anew.

        Raises:
            UnisonoError: they differ; names what differs, and the worker.
        """
        self.reset()
        hyperparameters, weights = digests[::2], digests[1::2]
        for rank in range(1, self._size):
            if hyperparameters[rank] != hyperparameters[0]:
                raise UnisonoError(
                    f"hyperparameters of {self._optimizer}, or the number of its steps, differ between workers 0 and "
                    f"{rank}: change them on all workers alike, for example by a metric that is world.mean(metric)"
                )
            if abs(weights[rank] - weights[0]) > _TOLERANCE * max(abs(weights[rank]), abs(weights[0])):
                raise UnisonoError(
                    f"weights differ between workers 0 and {rank}, for example those of {self._parameter}: one of them "
                    "changed its model or optimizer alone. Load checkpoints on all workers, or call world.share(model)"
                )


def _number(tensor: Tensor, step: int) -> float:
    """One number of `tensor`, another one at each step."""
    number = float(tensor.detach().reshape(-1)[step * 7919 % tensor.numel()].abs())
    return number if math.isfinite(number) else 0.0
