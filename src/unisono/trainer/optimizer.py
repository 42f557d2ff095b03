"""A torch optimizer as the trainer sees it: fused where it can be, its learning rate scheduled, its state under global
names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import InvalidInput
from unisono.sync.late_momentum import begins_late
from unisono.tasks.callables import required

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
# In half precision torch's fused SGD leaves most numbers as they are on a CPU (2.13), and others round elsewhere.
_FUSED_ON_CPU = (torch.float32, torch.float64)


def optimizer_of(make: Callable[[Iterable[nn.Parameter]], Optimizer], parameters: Sequence[nn.Parameter]) -> Optimizer:
    """What `make` makes of `parameters`, of which a worker may have none: all that it holds of a model is frozen."""
    if parameters:
        return make(parameters)
    # Torch's have to have one when they are made; Muon, a matrix.
    optimizer = make([nn.Parameter(torch.empty(0, 0))])
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.state.clear()
    return optimizer


def check_optimizer(kind: type[Optimizer]) -> None:
    """Raise `InvalidInput` if workers cannot take steps of this `kind` together."""
    if needed := required(kind.step)[1:]:  # the first is the optimizer itself
        raise InvalidInput(
            "optimizer", kind.__name__, f"its step runs the model several times, through {needed[0]}, which workers "
            "cannot do together", "use an optimizer whose step() needs no arguments, for instance AdamW")  # fmt: skip


def prefer_fused(optimizer: Optimizer, sparse: bool) -> None:
    """Turn on the fused step where torch has one that computes what its plain step does, and the user left the choice
    open (2.7 times quicker for AdamW on a CPU than torch's default)."""
    if type(optimizer) not in _FUSED or sparse:
        return
    for group in optimizer.param_groups:
        open_choice = group.get("fused") is None and group.get("foreach") is None
        plain = not any(group.get(option) for option in ("differentiable", "capturable", "dampening"))
        # Adagrad has made its state by now, on the CPU, where a CUDA kernel would not find it.
        here = type(optimizer) is not torch.optim.Adagrad or all(p.device.type == "cpu" for p in group["params"])
        if open_choice and plain and here and all(map(_fuses, group["params"])):
            group["fused"] = True
    begins_late(optimizer)


def _fuses(parameter: nn.Parameter) -> bool:
    on_cpu = parameter.device.type == "cpu"
    return parameter.dtype in _FUSED_ON_CPU if on_cpu else parameter.is_floating_point()


class LearningRate:
    """The learning rates of all groups, as a function of the step.

    Args:
        lr: in place of the groups' own; None keeps those.
    """

    def __init__(self, optimizer: Optimizer, lr: float | None) -> None:
        self._optimizer = optimizer  # whose groups are others after a state was loaded
        self._base = [float(group["lr"]) if lr is None else lr for group in optimizer.param_groups]

    def set(self, factor: float) -> None:
        """Every group's learning rate becomes `factor` times its base."""
        for group, base in zip(self._optimizer.param_groups, self._base):
            group["lr"] = base * factor


def state_of(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The optimizer's state as ``parameter/key`` to tensor, and to number where it keeps plain numbers."""
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
    """Give the optimizer back what `state_of` took; groups (and so hyperparameters) stay as they were built."""
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    states: dict[int, dict[str, Any]] = {}
    for path, value in [*tensors.items(), *numbers.items()]:
        name, key = path.rsplit("/", 1)
        states.setdefault(order.index(name), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
