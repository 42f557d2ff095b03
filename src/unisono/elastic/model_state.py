"""A model's tensors and its optimizer's state, by their global names."""

from __future__ import annotations

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
    """The tensors, and the plain numbers, of the optimizer's state, both by the name ``parameter/key``."""
    names = {id(p): name for name, p in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = f"{names[id(parameter)]}/{key}"
            if isinstance(value, Tensor):
                tensors[name] = value
            elif isinstance(value, int | float):
                numbers[name] = value
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
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
