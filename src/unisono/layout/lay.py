"""A model laid over the workers of a replica, axis by axis."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from unisono.layout.context import Passage, verify
from unisono.layout.deferred import Deferred, record
from unisono.layout.held import Held
from unisono.layout.layout import AXES, Layout
from unisono.layout.places import Places
from unisono.layout.sample import Sample
from unisono.layout.shard import shard
from unisono.layout.tensor import TensorPlan, apply, derive

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
        return _held(model, layout, mesh, sample, _spread(model, layout, mesh, sample))
    deferred = record(build)
    if deferred.whole and mesh.get_rank() == 0:
        LOG.info("the model is built whole on every worker: %s", deferred.why)
    model = deferred.model.to(mesh.device_type) if deferred.whole else deferred.model
    split = _spread(model, layout, mesh, sample)
    if not deferred.whole:
        model.to_empty(device=mesh.device_type)
    held = _held(model, layout, mesh, sample, split)
    if not deferred.whole:
        _fill(held, deferred)
    return held


def _fill(held: Held, deferred: Deferred) -> None:
    here = {**dict(held.local.named_parameters()), **dict(held.local.named_buffers())}

    def keep(name: str, whole: Tensor) -> None:
        part = held.parts.get(name)
        with torch.no_grad():
            here[name].copy_(whole[part.slices] if part else whole)

    deferred.materialise(keep)


def _spread(model: nn.Module, layout: Layout, mesh: DeviceMesh, sample: Sample) -> set[str]:
    """Change `model` in place, axis by axis; returns the names of what is split over the tensor axis."""
    if layout.tensor > 1:
        plan = derive(model, layout.tensor, sample.arguments)
        if mesh.get_rank() == 0:
            _tell(plan)
        apply(model, mesh["tensor"], plan)
    split = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if layout.shard * layout.context > 1:
        shard(model, _sharding(layout, mesh))
    return split


def _held(model: nn.Module, layout: Layout, mesh: DeviceMesh, sample: Sample, split: Collection[str]) -> Held:
    first = mesh.get_local_rank("tensor") == 0
    held = Held.of(model, elsewhere=[] if first else [n for n, _ in model.named_parameters() if n not in split])
    return replace(held, passage=Passage(mesh["context"], sample.weight)) if layout.context > 1 else held


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
