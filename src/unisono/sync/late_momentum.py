"""Momentum that begins in a later step for some parameters than for others."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def begins_late(optimizer: Optimizer) -> None:
    """Let parameters of a fused `torch.optim.SGD` get their first gradient in any step.

    torch's fused SGD begins the momentum of all parameters in one step, and raises TypeError where a parameter gets its
    first gradient later than others. Without dampening a buffer of zeros is the same beginning.
    """
    if type(optimizer) is torch.optim.SGD:
        optimizer.register_step_pre_hook(_begin)


def _begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        buffers = {p: optimizer.state.get(p, {}).get("momentum_buffer") for p in group["params"] if p.grad is not None}
        if group["fused"] and group["momentum"] and any(buffer is not None for buffer in buffers.values()):
            for parameter in (p for p, buffer in buffers.items() if buffer is None):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
