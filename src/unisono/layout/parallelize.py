"""Builds a model's local part on each worker of a replica: record, apply the axes, allocate, initialize."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from unisono.layout.apply_axes import apply_axes
from unisono.layout.context import MicroBatchPart, verify_sample
from unisono.layout.deferred import DeferredModel, record
from unisono.layout.deferred.tensor_slots import Slots, tie
from unisono.layout.layout import AXES, Layout
from unisono.layout.local_model import LocalModel
from unisono.layout.rank_mesh import RankMesh
from unisono.layout.repeated_blocks import BlockOptions
from unisono.layout.sample_batch import Sample

LOG = logging.getLogger("unisono")


def device_mesh(places: RankMesh, device_type: str) -> DeviceMesh:
    """Collective: the mesh of all workers, in torch's default process group."""
    return init_device_mesh(device_type, places.shape, mesh_dim_names=("replica", *AXES))


def parallelize(
    build: Callable[[], nn.Module],
    layout: Layout,
    mesh: DeviceMesh,
    sample: Sample,
    compute: BlockOptions | None = None,
) -> LocalModel:
    """Collective: this worker's part of the model that `build` returns, with the same bits as a build on one device.

    The random state must be the same on all workers. The whole model is never in memory, unless its construction cannot
    be deferred.

    Args:
        sample: candidate splits are verified on it.
        compute: how the blocks compute.

    Raises:
        InvalidInput: the model does not allow this layout; names the obstacle and a remedy.
    """
    compute = compute or BlockOptions()
    if layout.context > 1:  # verification needs the model's weights
        model = build().to(mesh.device_type)
        without_padding = verify_sample(model, sample, layout.context)
        held = apply_axes(model, layout, mesh, sample, compute).local_model(layout, mesh, sample)
        return replace(held, micro_batch_part=MicroBatchPart(mesh["context"], sample, without_padding))
    deferred = record(build)
    if deferred.whole and mesh.get_rank() == 0:
        LOG.info("the whole model is built on every worker: %s", deferred.why)
    model = deferred.model.to(mesh.device_type) if deferred.whole else deferred.model
    found = apply_axes(model, layout, mesh, sample, compute)
    if deferred.whole:
        return found.local_model(layout, mesh, sample)
    _allocate(found.model, mesh.device_type)
    if layout.offload:
        _move_to_host(found.model)
    held = found.local_model(layout, mesh, sample)
    _fill(held, deferred)
    return held


def parallelize_fake(
    build: Callable[[], nn.Module],
    layout: Layout,
    mesh: DeviceMesh,
    sample: Sample,
    compute: BlockOptions,
    shapes: Callable[[], AbstractContextManager[Any]],
) -> LocalModel:
    """As `parallelize`, with tensors that are made within ``shapes()``, and are zeros if they have memory.

    Nothing is measured: stages of a pipeline begin at the layout's cuts, else they are balanced by bytes.
    """
    deferred = record(build)
    if deferred.whole:
        LOG.info("the whole model is built on every worker: %s", deferred.why)
        deferred.materialize(lambda name, whole: None)  # frees its memory
    found = apply_axes(deferred.model, layout, mesh, sample, compute, measured=False)
    with shapes():
        _allocate(found.model, mesh.device_type)
    held = found.local_model(layout, mesh, sample)
    with shapes(), torch.no_grad():
        for tensor in (*held.local.parameters(), *held.local.buffers()):
            tensor.zero_()
    return held


def _allocate(model: nn.Module, device: str) -> None:
    """Allocate memory by `Module.to_empty`, and tie tensors again, as `to_empty` allocates a tied tensor per slot."""
    tied = Slots(model).tied
    model.to_empty(device=device)
    for slots in tied:
        tie(slots, getattr(*slots[0]))


def _move_to_host(model: nn.Module) -> None:
    """Move sharded parameters to host memory. Buffers and whole parameters stay on the device, where forward reads
    them."""
    buffers = [(m._buffers, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    whole = [(m._parameters, name, p, p.data) for m in model.modules() for name, p in m._parameters.items()
             if p is not None and not isinstance(p, DTensor)]  # fmt: skip
    model.cpu()
    for home, name, buffer in buffers:
        home[name] = buffer
    for place, name, parameter, data in whole:
        place[name] = parameter
        parameter.data = data


def _fill(held: LocalModel, deferred: DeferredModel) -> None:
    empty = {**dict(held.local.named_parameters()), **dict(held.local.named_buffers())}

    def copy_part(name: str, whole: Tensor) -> None:
        part = held.parts.get(name)
        if name in empty:
            with torch.no_grad():
                empty.pop(name).copy_(whole[part.slices()] if part else whole)

    deferred.materialize(copy_part)
    assert not empty, f"no values were computed for {', '.join(empty)}"
