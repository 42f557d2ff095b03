"""A model laid over the workers of a replica, axis by axis."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from unisono.layout.context import Passage, verify
from unisono.layout.deferred import Deferred, record
from unisono.layout.held import Held
from unisono.layout.layout import AXES, Layout
from unisono.layout.pipeline import Pipeline, split, stages_of
from unisono.layout.places import Places
from unisono.layout.sample import Sample
from unisono.layout.shard import shard
from unisono.layout.tensor import TensorPlan, apply, derive, refusal

LOG = logging.getLogger("unisono")


def mesh_of(places: Places, device_type: str) -> DeviceMesh:
    """The mesh of all workers, in torch's default process group; they make it together."""
    return init_device_mesh(device_type, places.shape, mesh_dim_names=("replica", *AXES))


def lay(build: Callable[[], nn.Module], layout: Layout, mesh: DeviceMesh, sample: Sample) -> Held:
    """This worker's part of the model that `build` builds, with the bits that it has on one device; all workers call it
    alike, with the same random state. The whole model is never in memory, but for a model that has to be.

    Args:
        sample: on it is tried out what can be split.

    Raises:
        InvalidInput: the model cannot be laid out so; names what cannot, and what to do.
    """
    if layout.context > 1:  # it is tried out with its numbers
        model = build().to(mesh.device_type)
        forward = partial(sample.forward, model)
        verify(model, sample.batch, layout.context, forward=forward, loss=sample.loss, weight=sample.weight)
        return _spread(model, layout, mesh, sample).held(layout, mesh, sample)
    deferred = record(build)
    if deferred.whole and mesh.get_rank() == 0:
        LOG.info("the model is built whole on every worker: %s", deferred.why)
    model = deferred.model.to(mesh.device_type) if deferred.whole else deferred.model
    spread = _spread(model, layout, mesh, sample)
    if deferred.whole:
        return spread.held(layout, mesh, sample)
    spread.model.to_empty(device=mesh.device_type)
    held = spread.held(layout, mesh, sample)
    _fill(held, deferred)
    return held


def outline(
    build: Callable[[], nn.Module],
    layout: Layout,
    mesh: DeviceMesh,
    sample: Sample,
    shapes: Callable[[], AbstractContextManager[Any]],
) -> Held:
    """What `lay` would give, of tensors that are made within ``shapes()``: zeros, where those have memory."""
    deferred = record(build)
    if deferred.whole:
        LOG.info("the model is built whole on every worker: %s", deferred.why)
        deferred.materialise(lambda name, whole: None)  # nothing of it is kept
    spread = _spread(deferred.model, layout, mesh, sample)
    with shapes():
        spread.model.to_empty(device=mesh.device_type)
    held = spread.held(layout, mesh, sample)
    with shapes(), torch.no_grad():
        for tensor in (*held.local.parameters(), *held.local.buffers()):
            tensor.zero_()
    return held


def _fill(held: Held, deferred: Deferred) -> None:
    here = {**dict(held.local.named_parameters()), **dict(held.local.named_buffers())}

    def keep(name: str, whole: Tensor) -> None:
        part = held.parts.get(name)
        if name in here:
            with torch.no_grad():
                here[name].copy_(whole[part.slices] if part else whole)

    deferred.materialise(keep)


def _spread(model: nn.Module, layout: Layout, mesh: DeviceMesh, sample: Sample) -> _Spread:
    """Change `model` in place, axis by axis."""
    if layout.tensor > 1:
        refusal(model, layout.tensor)
        plan = derive(model, layout.tensor, sample.arguments)
        if mesh.get_rank() == 0:
            _tell(plan)
        apply(model, mesh["tensor"], plan)
    pipeline = _pipeline(model, layout, mesh, sample) if layout.pipeline > 1 else None
    pieces: list[nn.Module] = list(pipeline.stages.values()) if pipeline else [model]
    here = nn.ModuleList(pieces) if pipeline else model
    matrices = {name for name, p in _leaves(here, pipeline).items() if isinstance(p, DTensor)}
    if layout.shard * layout.context > 1:
        for piece in pieces:
            shard(piece, _sharding(layout, mesh))
    return _Spread(here, pipeline, matrices)


@dataclass(frozen=True)
class _Spread:
    """This worker's modules, its pipeline if there is one, and the names of what is split over the tensor axis."""

    model: nn.Module
    pipeline: Pipeline | None
    matrices: Collection[str]

    def held(self, layout: Layout, mesh: DeviceMesh, sample: Sample) -> Held:
        """Once the numbers are to come, or there."""
        leaves = _leaves(self.model, self.pipeline)
        counted = set(self.pipeline.counted()) if self.pipeline else leaves.keys()
        if mesh.get_local_rank("tensor") != 0:
            counted &= set(self.matrices)
        buffers = dict(self.model.named_buffers())
        if self.pipeline:
            buffers = {n: b for stage in self.pipeline.stages.values() for n, b in stage.named_buffers()}
        held = Held.of(self.model, leaves, buffers, elsewhere=leaves.keys() - counted)
        if layout.context > 1:
            return replace(held, passage=Passage(mesh["context"], sample.weight))
        return replace(held, pipeline=self.pipeline)


def _leaves(model: nn.Module, pipeline: Pipeline | None) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters()) if pipeline is None else pipeline.parameters()


def _pipeline(model: nn.Module, layout: Layout, mesh: DeviceMesh, sample: Sample) -> Pipeline:
    device = next(model.parameters()).device
    given = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, sample.arguments)
    stages = split(model, given, layout.stages, cuts=layout.cuts or None)
    if mesh.get_rank() == 0:
        LOG.info("the pipeline's stages begin at %s", ", ".join(stages.cuts))
    mine = stages_of(layout.schedule, layout.pipeline, layout.stages, mesh.get_local_rank("pipeline"))
    return Pipeline(
        {number: stages.modules[number] for number in mine}, layout.stages, mesh["pipeline"].get_group(),
        layout.schedule, torch.device(mesh.device_type), stages.tied)  # fmt: skip


def _sharding(layout: Layout, mesh: DeviceMesh) -> DeviceMesh:
    """The workers whose gradients add up: those of a shard group, and those that have parts of one sequence."""
    if layout.context == 1 or layout.shard == 1:
        return mesh["shard" if layout.context == 1 else "context"]
    return mesh["shard", "context"]._flatten("sharded")


def _tell(plan: TensorPlan) -> None:
    LOG.info(
        "split over the tensor axis: %s", ", ".join(f"{n} ({word})" for n, word in plan.split.items()) or "nothing"
    )
    for name, why in plan.whole.items():
        LOG.info("%s stays whole: %s", name, why)
