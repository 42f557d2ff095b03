"""A model laid over the workers of a replica, axis by axis."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from unisono.layout.context import Passage, verify
from unisono.layout.deferred import Deferred, record
from unisono.layout.held import Held
from unisono.layout.layout import AXES, Layout
from unisono.layout.pipeline import Joints, Pipeline, by_name, joints, measure, split, stages_of, worker_of
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
    costs = _costs(model, layout, mesh, sample) if layout.pipeline > 1 and not layout.cuts else None
    if layout.tensor > 1:
        refusal(model, layout.tensor)
        plan = derive(model, layout.tensor, sample.arguments)
        if mesh.get_rank() == 0:
            _tell(plan)
        apply(model, mesh["tensor"], plan)
    pipeline = _pipeline(model, layout, mesh, sample, costs) if layout.pipeline > 1 else None
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
        held = replace(held, pipeline=self.pipeline)
        return replace(held, passage=Passage(mesh["context"], sample.weight)) if layout.context > 1 else held


def _leaves(model: nn.Module, pipeline: Pipeline | None) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters()) if pipeline is None else pipeline.parameters()


def _costs(model: nn.Module, layout: Layout, mesh: DeviceMesh, sample: Sample) -> list[float] | None:
    """Seconds of each segment of a pipeline, as worker 0 measures them; None where that cannot be."""
    found = joints(model, _given(model, sample), (), layout.stages)
    seconds = torch.full([len(found.names) + 1], math.nan, dtype=torch.float64)
    if mesh.get_rank() == 0 and layout.stages < len(seconds):
        try:
            seconds = torch.tensor(_measured(found, torch.device(mesh.device_type), sample), dtype=torch.float64)
        except Exception as error:  # whatever the model raises on made-up numbers
            LOG.info("stages are cut by bytes, for a trial of their speed failed: %s", error)
    seconds = seconds.to(mesh.device_type)
    dist.broadcast(seconds, 0)
    return None if seconds.isnan().any() else seconds.tolist()


def _measured(found: Joints, device: torch.device, sample: Sample) -> list[float]:
    inputs, batch = (_moved(each, device) for each in (sample.arguments, sample.batch))
    named = by_name(inspect.signature(found.model.forward), inputs)
    return measure(found, named, device, lambda output: sample.loss(output, batch))


def _pipeline(
    model: nn.Module, layout: Layout, mesh: DeviceMesh, sample: Sample, costs: list[float] | None
) -> Pipeline:
    holders = [worker_of(layout.schedule, layout.pipeline, layout.stages, stage) for stage in range(layout.stages)]
    stages = split(model, _given(model, sample), layout.stages, layout.cuts or None, costs, holders=holders)
    if mesh.get_rank() == 0:
        what = "time" if costs else "bytes"
        shares = ", ".join(f"{share:.0%}" for share in stages.shares)
        LOG.info("the pipeline's stages begin at %s%s", ", ".join(stages.cuts), shares and f"; of its {what}: {shares}")
    mine = stages_of(layout.schedule, layout.pipeline, layout.stages, mesh.get_local_rank("pipeline"))
    return Pipeline(
        {number: stages.modules[number] for number in mine}, layout.stages, mesh["pipeline"].get_group(),
        layout.schedule, torch.device(mesh.device_type), stages.tied)  # fmt: skip


def _given(model: nn.Module, sample: Sample) -> Any:
    """The sample's inputs where the model is; for one without numbers, where they are."""
    device = next(model.parameters()).device
    return sample.arguments if device.type == "meta" else _moved(sample.arguments, device)


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, value)


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
