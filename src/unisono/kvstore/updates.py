"""What a pushed value does to the stored one: it replaces it, or an updater or a torch optimizer changes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import InvalidInput
from unisono.kvstore.arrays import Key
from unisono.sync.server.slice_optimizer import ELEMENTWISE

Updater = Callable[[Any, Any, Any], Any]
"""``updater(key, received, stored)`` changes `stored` in place."""
OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
"""Makes a torch optimizer of a list of parameters."""
_NOT_SAVED = ("params", "param_names")


@dataclass(frozen=True)
class StoredPart:
    """A part of a value, at the worker that stores it.

    Args:
        number: of the part in the value.
        value: in host memory, changed in place.
        as_numpy: whether an updater gets numpy arrays.
    """

    key: Key
    number: int
    value: Tensor
    as_numpy: bool


class Update(Protocol):
    """What is done with each push, or with the sum of those of all workers."""

    def apply(self, part: StoredPart, received: Tensor) -> None:
        """Change ``part.value``. `received` has the same shape and dtype, and may be overwritten."""


class Replacement:
    """The received value replaces the stored one."""

    def apply(self, part: StoredPart, received: Tensor) -> None:
        """As of `Update`."""
        part.value.copy_(received)


class UpdaterCall:
    """Calls an updater."""

    def __init__(self, updater: Updater) -> None:
        self._updater = updater

    def apply(self, part: StoredPart, received: Tensor) -> None:
        """As of `Update`."""
        if part.as_numpy:
            self._updater(part.key, received.numpy(), part.value.numpy())
        else:
            self._updater(part.key, received, part.value)


class OptimizerStep:
    """Takes the step of a torch optimizer; each part has one, made by `factory`.

    Attributes:
        kind: the class of the optimizers.

    Raises:
        InvalidInput: `factory` does not make a torch optimizer of a list of parameters.
    """

    def __init__(self, factory: OptimizerFactory) -> None:
        self._factory = factory
        self.kind = type(self._made(torch.zeros(1)))
        self._optimizers: dict[tuple[Key, int], Optimizer] = {}

    @property
    def elementwise(self) -> bool:
        """Whether stepping the parts of a value is stepping the value."""
        return self.kind in ELEMENTWISE.values()

    def apply(self, part: StoredPart, received: Tensor) -> None:
        """As of `Update`; `received` is the gradient."""
        optimizer = self._of(part)
        parameter = optimizer.param_groups[0]["params"][0]
        parameter.grad = received
        optimizer.step()
        parameter.grad = None

    def state(self, part: StoredPart) -> dict[str, Any]:
        """The optimizer's ``state`` of `part`, and its hyperparameters as ``groups``; to be read only."""
        found = self._of(part).state_dict()
        groups = [
            {name: value for name, value in group.items() if name not in _NOT_SAVED} for group in found["param_groups"]
        ]
        return {"state": found["state"].get(0, {}), "groups": groups}

    def restore(self, part: StoredPart, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        """Continue with what `state` returned; empty `groups` leave the hyperparameters as they are."""
        optimizer = self._of(part)
        whole = optimizer.state_dict()
        whole["state"] = {0: dict(state)} if state else {}
        for group, values in zip(whole["param_groups"], groups):
            group.update(values)
        optimizer.load_state_dict(whole)

    def _of(self, part: StoredPart) -> Optimizer:
        place = part.key, part.number
        if place not in self._optimizers:
            self._optimizers[place] = self._made(part.value)
        return self._optimizers[place]

    def _made(self, value: Tensor) -> Optimizer:
        made: Any = self._factory
        if callable(made) and not isinstance(made, Optimizer):
            made = made([nn.Parameter(value, requires_grad=False)])
        if not isinstance(made, Optimizer) or made is self._factory:
            raise InvalidInput("optimizer", type(made).__name__, "it does not make a torch optimizer", "pass a "
                               "function: lambda parameters: torch.optim.SGD(parameters, lr=0.1)")  # fmt: skip
        return made
