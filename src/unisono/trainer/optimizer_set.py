"""Several optimizers of one loop, as the one whose state is saved, sent and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class OptimizerSet:
    """Has the parameter groups of all `optimizers`, in order, and their state by parameter.

    Where a second optimizer has state for the same parameter, its keys begin with its number and a colon.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)

    @staticmethod
    def of(optimizers: Iterable[Optimizer]) -> Any:
        """The only optimizer itself, or a set of several."""
        every = list(optimizers)
        return every[0] if len(every) == 1 else OptimizerSet(every)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As of an optimizer; the dictionaries are those of the optimizers."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """As of an optimizer, in new dictionaries."""
        found: dict[Tensor, dict[str, Any]] = {}
        for number, optimizer in enumerate(self._optimizers):
            for parameter, state in optimizer.state.items():
                prefix = f"{number}:" if parameter in found else ""
                found.setdefault(parameter, {}).update({f"{prefix}{key}": value for key, value in state.items()})
        return found

    def state_dict(self) -> dict[str, Any]:
        """As of an optimizer; parameters are numbered through all groups."""
        groups, first = [], 0
        for group in self.param_groups:
            numbers = range(first, first + len(group["params"]))
            groups.append({**group, "params": list(numbers)})
            first = numbers.stop
        return {"state": {}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that is numbered as `state_dict` numbers it, of the first group that has a parameter."""
        order = [parameter for group in self.param_groups for parameter in group["params"]]
        given = {order[number]: state for number, state in state_dict["state"].items()}
        for number, optimizer in enumerate(self._optimizers):
            own, first = optimizer.state_dict()["param_groups"], 0
            states = {}
            for group in optimizer.param_groups:
                for position, parameter in enumerate(group["params"], first):
                    state = given.get(parameter, {})
                    mine = self._keys(number, parameter, state)
                    if mine:
                        states[position] = mine
                first += len(group["params"])
            optimizer.load_state_dict({"state": states, "param_groups": own})

    def _keys(self, number: int, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a parameter's `state` that belongs to the optimizer of that number."""
        owners = [
            n for n, optimizer in enumerate(self._optimizers)
            if any(parameter is p for group in optimizer.param_groups for p in group["params"])
        ]  # fmt: skip
        prefix = f"{number}:"
        if number != owners[0]:
            return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        return {key: value for key, value in state.items() if not key.partition(":")[0].isdecimal() or ":" not in key}
