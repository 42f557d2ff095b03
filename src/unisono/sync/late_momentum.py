"""Support for parameters whose first gradient, and so their momentum, comes later than that of others."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def allow_late_momentum(optimizer: Optimizer) -> None:
    """Allow parameters of a fused `torch.optim.SGD` to get their first gradient in any step.

    torch's fused SGD initializes the momentum of all parameters in one step, and raises TypeError if a parameter gets
    its first gradient later than others. Without dampening, a buffer of zeros has the same effect.
    """
    if type(optimizer) is torch.optim.SGD:
        optimizer.register_step_pre_hook(_add_buffers)


def _add_buffers(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        buffers = {p: optimizer.state.get(p, {}).get("momentum_buffer") for p in group["params"] if p.grad is not None}
        if group["fused"] and group["momentum"] and any(buffer is not None for buffer in buffers.values()):
            for parameter in (p for p, buffer in buffers.items() if buffer is None):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
