"""Compares outputs and gradients of two computations of one block, on random cotangents."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unisono.layout.tensor.forward_trace import Call, differentiable

TOLERANCE = 1e-5


@dataclass(frozen=True)
class PassResult:
    """The outputs of a pass, and the gradients of its inputs and parameters."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]


def run_pass(compute: Callable[[Call], Any], module: nn.Module, call: Call) -> PassResult:
    """The outputs of `compute`, and the gradients of a random weighting of them."""
    call = differentiable(call)
    outputs = [x for x in tree_leaves(compute(call)) if isinstance(x, Tensor) and x.is_floating_point()]
    leaves = [x for x in tree_leaves(call) if isinstance(x, Tensor) and x.requires_grad]
    leaves += [parameter for parameter in module.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    loss = sum(((x * w).sum().float() for x, w in zip(outputs, weights)), torch.zeros(()))
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else ()
    return PassResult([x.detach() for x in outputs], list(gradients))


def difference(expected: PassResult, outcome: PassResult) -> str:
    """A sentence that describes the difference; empty without one."""
    if not expected.outputs:
        return "it has no output to compare"
    if [x.shape for x in expected.outputs] != [x.shape for x in outcome.outputs]:
        return "its output has another shape"
    for what, off in (
        ("output", _distance(expected.outputs, outcome.outputs)),
        ("gradient", _distance(expected.gradients, outcome.gradients)),
    ):
        if not off <= 1:
            return f"its {what} differs from the whole by {off * TOLERANCE:.1g} of the largest element"
    return ""


def _distance(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> float:
    """The largest difference, in units of the tolerance; a missing gradient counts as zero."""
    pairs = [(_or_zero(a, b), _or_zero(b, a)) for a, b in zip(ours, theirs)]
    scale = max((float(a.abs().max()) for a, _ in pairs if a.numel()), default=0.0)
    off = max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)
    exactness = max((16 * torch.finfo(a.dtype).eps for a, _ in pairs), default=0.0)
    allowed = max(TOLERANCE, exactness) * scale
    if not math.isfinite(off) or not math.isfinite(scale):
        return math.inf
    return off / allowed if allowed else off and math.inf


def _or_zero(x: Tensor | None, like: Tensor | None) -> Tensor:
    if x is not None:
        return x
    return torch.zeros(()) if like is None else torch.zeros_like(like)
