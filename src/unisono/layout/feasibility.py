"""Checks in one process, without parameter values, whether a model allows a layout, before any worker starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import InvalidInput
from unisono.layout.context import SequenceSplit, attending, hide_padding, sequence_length, take_part, verify_sample
from unisono.layout.context.group import PendingTensor, Received
from unisono.layout.deferred import record
from unisono.layout.expert import check_divides, derive, stub_mixtures
from unisono.layout.expert.find_experts import expert_count, find_mixtures
from unisono.layout.layout import SCHEDULES, Layout
from unisono.layout.pipeline import cut_points, split
from unisono.layout.rank_mesh import RankMesh
from unisono.layout.repeated_blocks import BlockOptions
from unisono.layout.sample_batch import Sample
from unisono.layout.stage_split import inputs_on
from unisono.layout.tensor import check_heads, user_plan
from unisono.layout.tensor.forward_trace import trace_forward
from unisono.tensors.batch import to_device

_VERIFY_BYTES = 1 << 26  # smaller models are verified with weights, which takes a second or two
_FAILURES = (RuntimeError, ValueError, IndexError, TypeError)


def check(build: Callable[[], nn.Module], places: RankMesh, sample: Sample, compute: BlockOptions) -> nn.Module:
    """Raise what `parallelize` would raise on every worker, as far as shapes can show. Returns the model, on the meta
    device if its construction can be deferred.

    Raises:
        InvalidInput: the model does not allow the layout; names the bound and the nearest layout that works.
    """
    layout = places.layout
    model = record(build).model
    compute.check(model)
    if layout.context > 1:
        _check_context(build, model, places, sample)
    if layout.expert > 1:
        _check_experts(model, places)
    if layout.tensor > 1 and not layout.plan:
        _check_heads(model, places)
    with stub_mixtures(model):
        if layout.plan:
            user_plan(model, layout.tensor, layout.plan, sample.arguments)
        elif layout.tensor > 1:
            trace_forward(model, inputs_on(model, sample.arguments))
        if layout.pipeline > 1:
            _check_pipeline(model, places, sample)
    return model


def nearest_layout(places: RankMesh, axis: str, values: Iterable[int]) -> Layout | None:
    """The layout with another of `values` on `axis`, whose replicas divide the workers: the value nearest to the wanted
    one. None if there is no such value."""
    wanted = getattr(places.layout, axis)
    others: Any = {"cuts": ()}
    candidates = [replace(places.layout, **{**others, axis: value}) for value in values if value != wanted]
    fitting = [each for each in candidates if places.workers % each.workers == 0]
    return min(fitting, key=lambda each: abs(getattr(each, axis) - wanted), default=None)


def _check_heads(model: nn.Module, places: RankMesh) -> None:
    try:
        check_heads(model, places.layout.tensor)
    except InvalidInput as error:
        values = [n for n in range(1, places.workers + 1) if _divides(model, n)]
        found = nearest_layout(places, "tensor", values)
        raise InvalidInput(error.field, error.value, error.problem, f"write {found}" if found else error.cure) from None


def _check_experts(model: nn.Module, places: RankMesh) -> None:
    try:
        check_divides(model, places.layout.expert)
    except InvalidInput as error:
        common = math.gcd(*map(expert_count, dict(find_mixtures(model)).values()))
        values = [n for n in range(1, places.workers + 1) if common % n == 0]
        found = nearest_layout(places, "expert", values)
        raise InvalidInput(error.field, error.value, error.problem, f"write {found}" if found else error.cure) from None
    derive(model, places.layout.expert)


def _divides(model: nn.Module, degree: int) -> bool:
    try:
        check_heads(model, degree)
    except InvalidInput:
        return False
    return True


def _check_pipeline(model: nn.Module, places: RankMesh, sample: Sample) -> None:
    layout = places.layout
    given = inputs_on(model, sample.arguments)
    try:
        split(model, given, layout.stages, cuts=layout.cuts or None)
    except InvalidInput as error:
        if error.field != "stages" or layout.cuts:
            raise
        most = len(cut_points(model, given).segments()) // SCHEDULES[layout.schedule]
        values = range(1, most + 1)
        raise _error(error.field, layout.stages, error.problem, places, "pipeline", values, error.cure) from None


def _check_context(build: Callable[[], nn.Module], model: nn.Module, places: RankMesh, sample: Sample) -> None:
    size = places.layout.context
    tokens = sequence_length(sample.batch)
    try:
        parts = SequenceSplit(tokens, size)
    except InvalidInput as error:
        values = [n for n in range(1, tokens + 1) if n == 1 or tokens % (2 * n) == 0]
        problem = f"it needs {2 * size} chunks of equal length, and sequences have length {tokens}"
        raise _error("context", size, problem, places, "context", values, error.cure) from None
    if sum(p.nbytes for p in model.parameters()) <= _VERIFY_BYTES:
        verify_sample(build(), sample, size)
    elif why := _fails_on_parts(model, parts, sample):
        problem = f"{type(model).__name__} cannot run on parts of a sequence ({why})"
        raise InvalidInput("context", size, problem, "use context=1 for a model that does not take sequences")


def _error(
    field: str, value: Any, problem: str, places: RankMesh, axis: str, values: Iterable[int], cure: str
) -> InvalidInput:
    found = nearest_layout(places, axis, values)
    return InvalidInput(field, value, problem, f"write {found}, or {cure}" if found else cure)


def _fails_on_parts(model: nn.Module, parts: SequenceSplit, sample: Sample) -> str:
    """Why the model, which runs on the whole sample, fails on a part of it; empty if it runs, or if shapes cannot show
    it."""
    device = next(model.parameters()).device
    batch, keys = hide_padding(to_device(sample.batch, device), sample.inputs, parts.length)
    with torch.no_grad():
        try:
            sample.forward(model, batch)
        except _FAILURES:
            return ""
        try:
            with attending(_IdenticalPeers(parts.size), parts, keys=keys):
                sample.forward(model, take_part(batch, parts, 0))
        except _FAILURES as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


class _IdenticalPeers:
    """`Peers` of rank 0 in which every rank has the tensors of this one."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, mine: Tensor) -> Tensor:
        return mine.expand(self.size, *mine.shape)

    def ring_shift(self, mine: Tensor) -> PendingTensor:
        return Received(mine)
