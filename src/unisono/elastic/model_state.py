"""A model's tensors and its optimizer's state, by their global names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under its global name, each tensor once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def names_of(model: nn.Module) -> dict[str, Any]:
    """How the names in ``model.state_dict()`` differ from those of `weights_of`, for a checkpoint's manifest.

    Returns:
        ``aliases``: for tensors with several names, each further name with the first one; ``transient``: the names of
        buffers that ``state_dict()`` leaves out.
    """
    first = {id(tensor): name for name, tensor in weights_of(model).items()}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    aliases = {name: first[id(tensor)] for name, tensor in every if first[id(tensor)] != name}
    own = [f"{path}.{key}".lstrip(".") for path, m in model.named_modules() for key in m._non_persistent_buffers_set]
    return {"aliases": aliases, "transient": sorted(own)}


def state_of(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The tensors, and the plain numbers, of the optimizer's state, both by the name ``parameter/key``.

    The items of a list, such as those of LBFGS, have the names ``parameter/key[0]`` and so on. For an empty list there
    is a number ``parameter/key[]``.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = f"{names[id(parameter)]}/{key}"
            if isinstance(value, list) and all(isinstance(each, Tensor | int | float) for each in value):
                items = {f"{name}[{i}]": each for i, each in enumerate(value)} or {f"{name}[]": 0}
            else:
                items = {name: value}
            tensors |= {name: each for name, each in items.items() if isinstance(each, Tensor)}
            numbers |= {name: each for name, each in items.items() if isinstance(each, int | float)}
    return tensors, numbers


def load_state(
    optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]
) -> None:
    """Load what `state_of` returned into the optimizer. Groups, and so hyperparameters, stay as they were built."""
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    states: dict[int, dict[str, Any]] = {}
    for path, value in [*tensors.items(), *numbers.items()]:
        name, key = path.rsplit("/", 1)
        states.setdefault(order.index(name), {})[key] = value
    for state in states.values():
        _join_lists(state)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})


_ITEM = re.compile(r"(.+)\[(\d*)\]")


def _join_lists(state: dict[str, Any]) -> None:
    """Replace the items of each list in the state of one parameter, as `state_of` names them, by the list."""
    items = [(found[1], int(found[2] or -1), key) for key in state if (found := _ITEM.fullmatch(key))]
    for name, number, key in sorted(items):
        values, value = state.setdefault(name, []), state.pop(key)
        if number >= 0:
            values.append(value)
