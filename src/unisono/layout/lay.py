"""A model laid over the workers of a replica, axis by axis."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from unisono.layout.context import Passage, verify
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


def lay(model: nn.Module, layout: Layout, mesh: DeviceMesh, sample: Sample) -> Held:
    """This worker's part of `model`, which is changed in place; all workers call it alike, with the same weights.

    Args:
        sample: on it is tried out what can be split.

    Raises:
        InvalidInput: the model cannot be laid out so; names what cannot, and what to do.
    """
    if layout.context > 1:
        forward = partial(sample.forward, model)
        verify(model, sample.batch, layout.context, forward=forward, loss=sample.loss, weight=sample.weight)
    if layout.tensor > 1:
        plan = derive(model, layout.tensor, sample.arguments)
        if mesh.get_rank() == 0:
            _tell(plan)
        apply(model, mesh["tensor"], plan)
    split = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if layout.shard * layout.context > 1:
        shard(model, _sharding(layout, mesh))
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
