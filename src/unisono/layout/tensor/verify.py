"""Verifies a plan: each split, computed rank by rank in one process, is compared with the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from unisono.layout.split_styles import COLUMNS, GATHERED, ROW, VOCABULARY
from unisono.layout.tensor.forward_trace import ForwardTrace, trace_forward
from unisono.layout.tensor.split_trial import SplitTrial, Unit
from unisono.layout.tensor.tensor_plan import TensorPlan


def verify(model: nn.Module, plan: TensorPlan, degree: int, sample: tuple[Any, ...] | Mapping[str, Any]) -> TensorPlan:
    """`plan`, with every split that computes something else moved to `whole`, with the reason.

    Outputs and gradients of every split block are compared within 1e-5 of their largest element, on the block's inputs
    when `model` runs on `sample`. No process is started. A model on the meta device runs there, and its blocks are
    compared one at a time with random weights and inputs.

    Raises:
        InvalidInput: a name in the plan that fits no module.
    """
    plan = plan.resolved(model)
    trial = SplitTrial(model, degree, trace_forward(model, sample))
    split: dict[str, str] = {}
    whole: dict[str, str] = dict(plan.whole)
    local: dict[str, str] = {}
    for unit in units(plan.split, trial.seen):
        verdict = trial.of(unit)
        if verdict.reason:
            whole |= dict.fromkeys(unit, verdict.reason)
        else:
            split |= unit
            local |= {verdict.scope: verdict.treatment} if verdict.treatment else {}
    return TensorPlan(split, whole, local)


def units(split: Mapping[str, str], seen: ForwardTrace) -> Iterator[Unit]:
    """The entries of `split`, in groups that can only be split together, in the order of the forward pass."""
    columns: dict[str, str] = {}
    ties = _tied(split, seen)
    called = [name for name in seen.order if name in split]
    for name in [*called, *(name for name in split if name not in seen.order)]:
        word = split[name]
        if word in COLUMNS:
            columns[name] = word
        elif word == ROW:
            yield {**columns, name: word}
            columns = {}
        elif name in ties:
            if (pair := ties[name]) is not None:
                yield pair
        else:
            yield {name: word}
    if columns:
        yield columns


def _tied(split: Mapping[str, str], seen: ForwardTrace) -> dict[str, Unit | None]:
    tied: dict[str, Unit | None] = {}
    for users in seen.users.values():
        shared = [name for name in split if name in users and split[name] in (VOCABULARY, GATHERED)]
        if len(shared) > 1 and not tied.keys() & set(shared):
            first, *others = sorted(shared, key=seen.order.index)
            tied |= {first: {name: split[name] for name in shared}, **dict.fromkeys(others)}
    return tied
