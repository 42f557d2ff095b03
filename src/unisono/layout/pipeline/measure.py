"""What each segment of a model's chain costs, measured: so that automatic cuts balance time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.layout.pipeline.split import joints
from unisono.layout.pipeline.stage import Inputs, Stage, by_name
from unisono.layout.pipeline.undisturbed import undisturbed


@dataclass(frozen=True)
class Cost:
    """A segment of the chain: seconds of forward and backward together, bytes of parameters."""

    units: tuple[str, ...]
    seconds: float
    bytes: int


def measure(model: nn.Module, sample: Inputs, repeats: int = 3) -> list[Cost]:
    """Each segment's cost on the sample, the fastest of `repeats`; leaves the model and its gradients as they were.

    Times differ from worker to worker: measure on one and hand the result, or the cuts, to all.

    Raises:
        InvalidInput: the model's chain cannot be found.
    """
    found = joints(model, sample)
    stages = found.cut(found.names).modules
    inputs = by_name(stages[0].call_signature, sample)
    seconds = [float("inf")] * len(stages)
    with undisturbed(model, *stages, training=True):
        for _ in range(1 + repeats):  # the first one warms up, and counts only where it was the fastest
            values: tuple[Tensor, ...] = ()
            for place, stage in enumerate(stages):
                values, spent = _timed(stage, values, inputs)
                seconds[place] = min(seconds[place], spent)
    return [Cost(*row) for row in zip(found.segments(), seconds, found.bytes())]


def _timed(stage: Stage, values: tuple[Tensor, ...], inputs: dict[str, Any]) -> tuple[tuple[Tensor, ...], float]:
    wanted = [t for t in (*values, *stage.parameters()) if t.requires_grad]
    wait = _waiting(next(stage.parameters()).device)
    begin = time.perf_counter()
    out = stage(*values, **inputs)
    learning = [v for v in out if v.requires_grad]
    if learning and wanted:
        torch.autograd.grad(learning, wanted, [torch.ones_like(v) for v in learning], allow_unused=True)
    wait()
    spent = time.perf_counter() - begin
    return tuple(v.detach().requires_grad_(v.requires_grad) for v in out), spent


def _waiting(device: torch.device) -> Callable[[], object]:
    module = getattr(torch, device.type, None)
    return getattr(module, "synchronize", lambda: None)
