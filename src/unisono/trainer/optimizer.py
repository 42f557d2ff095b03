"""A torch optimizer as the trainer sees it: fused where it can be, its learning rate scheduled, its state under global
names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.sync.late_momentum import allow_late_momentum

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
# In half precision torch's fused SGD leaves most numbers as they are on a CPU (2.13), and others round elsewhere.
_FUSED_ON_CPU = (torch.float32, torch.float64)


def build_optimizer(
    make: Callable[[Iterable[nn.Parameter]], Optimizer], parameters: Sequence[nn.Parameter]
) -> Optimizer:
    """What `make` makes of `parameters`, of which a worker may have none: all that it holds of a model is frozen."""
    if parameters:
        return make(parameters)
    # Torch's have to have one when they are made; Muon, a matrix.
    optimizer = make([nn.Parameter(torch.empty(0, 0))])
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.state.clear()
    return optimizer


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
    allow_late_momentum(optimizer)


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
