"""Changes a model in place, axis by axis, so that this worker computes its part."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from unisono.layout.block_calls import BlockCalls, trace_calls
from unisono.layout.call_agreement import check_calls
from unisono.layout.context import MicroBatchPart
from unisono.layout.expert import derive as derive_experts
from unisono.layout.expert import split as split_experts
from unisono.layout.expert import stub_mixtures
from unisono.layout.fsdp import FsdpUnsharding, shard_model
from unisono.layout.layout import Layout
from unisono.layout.local_model import LocalModel, NoUnsharding, Unsharding, dense
from unisono.layout.pipeline import Pipeline
from unisono.layout.repeated_blocks import BlockOptions, blocks
from unisono.layout.sample_batch import Sample
from unisono.layout.stage_split import build_pipeline, measure_costs
from unisono.layout.tensor import TensorPlan, apply, check_heads, derive, user_plan

LOG = logging.getLogger("unisono")


@dataclass(frozen=True)
class AppliedAxes:
    """This worker's part of a model after all axes were applied.

    Attributes:
        model: this worker's module, or its stages.
        pipeline: this worker's pipeline; None if layers are not split over workers.
        split_names: names of the parameters that are split over the tensor axis.
        unsharding: controls when the sharded parameters are unsharded.
        sparse: names of parameters whose optimizer gets sparse gradients.
    """

    model: nn.Module
    pipeline: Pipeline | None
    split_names: Collection[str]
    unsharding: Unsharding
    sparse: frozenset[str]

    def local_model(self, layout: Layout, mesh: DeviceMesh, sample: Sample) -> LocalModel:
        """The `LocalModel` of these modules. Their parameters must have memory, or get it in place later."""
        leaves = _leaves(self.model, self.pipeline)
        counted = set(self.pipeline.counted_names()) if self.pipeline else leaves.keys()
        if mesh.get_local_rank("tensor") != 0:
            counted &= set(self.split_names)
        if any(mesh.get_local_rank(axis) for axis in ("shard", "expert", "context")):
            counted &= {
                name for name, leaf in leaves.items() if isinstance(leaf, DTensor)
            }  # all others are whole on every rank
        if mesh.get_local_rank("replicate") != 0:
            counted = set()
        buffers = dict(self.model.named_buffers())
        if self.pipeline:
            buffers = {n: b for stage in self.pipeline.stages.values() for n, b in stage.whole_buffers().items()}
        held = LocalModel.of(self.model, leaves, buffers, counted_elsewhere=leaves.keys() - counted)
        held = replace(held, pipeline=self.pipeline, unsharding=self.unsharding, sparse=self.sparse)
        return replace(held, micro_batch_part=MicroBatchPart(mesh["context"], sample)) if layout.context > 1 else held


def apply_axes(
    model: nn.Module, layout: Layout, mesh: DeviceMesh, sample: Sample, compute: BlockOptions, *, measured: bool = True
) -> AppliedAxes:
    """Collective: divide `model` over the axes of `layout`, in place.

    Args:
        measured: whether stages of a pipeline are balanced by measured time.

    Raises:
        InvalidInput: the model does not allow the layout; names the obstacle and a remedy.
    """
    sparse = dense(model)
    mixtures = derive_experts(model, layout.expert) if layout.expert > 1 else None
    sharded = layout.gradient_group_size > 1 or layout.offload or compute.precision == "bf16_parameters"
    row = _sharding_mesh(layout, mesh, "shard", "expert", "context")
    with stub_mixtures(model):
        found = _traced_calls(model, sample, layout, row) if sharded else None
        measured = measured and layout.pipeline > 1 and not layout.cuts
        costs = measure_costs(model, layout, mesh, sample) if measured else None
        if layout.tensor > 1:
            apply(model, mesh["tensor"], _plan(model, layout, mesh, sample))
        compute.check(model)
        prepared = set(blocks(model))
        pipeline = build_pipeline(model, layout, mesh, sample, costs, compute) if layout.pipeline > 1 else None
    # `compute.change` keeps the `Stage` itself, and replaces only modules inside it.
    pieces = [compute.change(piece) for piece in (pipeline.stages.values() if pipeline else [model])]
    here = nn.ModuleList(pieces) if pipeline else pieces[0]
    matrices = {name for name, p in _leaves(here, pipeline).items() if isinstance(p, DTensor)}
    experts = split_experts(here, mesh["expert"], mixtures) if mixtures else []
    for block in [m for piece in pieces for m in piece.modules() if m in prepared]:
        compute.prepare(block)
    gathering = _shard_models(pieces, experts, layout, mesh, row, compute, found, pipeline) if found else NoUnsharding()
    return AppliedAxes(here, pipeline, matrices, gathering, sparse)


def _traced_calls(model: nn.Module, sample: Sample, layout: Layout, row: DeviceMesh) -> BlockCalls:
    found = trace_calls(model, blocks(model), sample)
    names = {module: name for name, module in model.named_modules()}
    check_calls(found, names, str(layout), _axis_groups(row), torch.device(row.device_type))
    if row.get_rank() == 0:
        for block, why in found.used_outside.items():
            LOG.info("%s is gathered together with the modules outside of blocks: %s", names[block], why)
        if found.may_vary:
            LOG.info("which blocks are called may depend on data: every worker gathers all blocks in every pass")
    return found


def _shard_models(
    pieces: Sequence[nn.Module],
    experts: Sequence[nn.Module],
    layout: Layout,
    mesh: DeviceMesh,
    row: DeviceMesh,
    compute: BlockOptions,
    found: BlockCalls,
    pipeline: Pipeline | None,
) -> FsdpUnsharding:
    bf16 = compute.precision == "bf16_parameters"
    if layout.offload and mesh.device_type == "cpu" and mesh.get_rank() == 0:
        LOG.info("nothing is offloaded: the device is a CPU")
    # Gradients of experts already cover all micro-batches of the expert axis, so experts are sharded over the other
    # axes. Where these have one worker, experts are not sharded: that would copy most of a model in every pass.
    rest = _sharding_mesh(layout, mesh, "shard", "context")
    for module in experts if rest.size() > 1 or layout.offload or bf16 else ():
        shard_model(module, rest, (), layout, bf16=bf16, last=False)
    apart = {p for module in experts for p in module.parameters()}
    repeated = [block for block in found.order if block not in found.used_outside]
    groups_of = partial(_exchange_groups, layout, mesh, row, set(experts))
    passes = [
        shard_model(piece, row, repeated, layout, bf16=bf16, last=getattr(piece, "is_last", True), apart=apart,
              exchange_groups=groups_of if found.may_vary else None)
        for piece in pieces
    ]  # fmt: skip
    if pipeline:
        pipeline.sharding_groups = _axis_groups(row)
    return FsdpUnsharding(pieces, layout, passes, row, found.may_vary)


def _exchange_groups(
    layout: Layout, mesh: DeviceMesh, row: DeviceMesh, experts: Collection[nn.Module], block: nn.Module
) -> list[dist.ProcessGroup]:
    """The groups whose workers exchange more than parameters within `block`."""
    found = [mesh["context"].get_group()] if layout.context > 1 else []
    if any(module in experts for module in block.modules()):
        found.append(mesh["expert"].get_group())
    if any(getattr(module, "buffers_agree", False) for module in block.modules()):  # synchronized batch normalization
        found += _axis_groups(row)
    return found


def _sharding_mesh(layout: Layout, mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """The mesh of the workers whose gradients are summed. Its last dimension has those that differ on `axes`; a
    dimension for ``replicate`` precedes it if there are several replicates."""
    wide = tuple(axis for axis in axes if getattr(layout, axis) > 1) or axes[:1]
    row = mesh[wide[0]] if len(wide) == 1 else mesh[wide]._flatten("_".join(wide))
    return DeviceMesh._concatenate([mesh["replicate"], row]) if layout.replicate > 1 else row


def _axis_groups(row: DeviceMesh) -> list[dist.ProcessGroup]:
    """The process groups of the dimensions of `row` with more than one worker."""
    return [row.get_group(dim) for dim in range(row.ndim) if row.size(dim) > 1]


def _leaves(model: nn.Module, pipeline: Pipeline | None) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters()) if pipeline is None else pipeline.parameters()


def _plan(model: nn.Module, layout: Layout, mesh: DeviceMesh, sample: Sample) -> TensorPlan:
    """The user's plan, or else a plan that is derived and verified."""
    if layout.plan:
        plan = user_plan(model, layout.tensor, layout.plan, sample.arguments)
    else:
        check_heads(model, layout.tensor)
        plan = derive(model, layout.tensor, sample.arguments)
    if mesh.get_rank() == 0:
        _log_plan(plan)
    return plan


def _log_plan(plan: TensorPlan) -> None:
    entries = (f"{n} ({'; '.join(filter(None, [word, plan.because.get(n)]))})" for n, word in plan.split.items())
    LOG.info("split over the tensor axis: %s", ", ".join(entries) or "nothing")
    for name, why in plan.whole.items():
        LOG.info("%s stays whole: %s", name or "the model itself", why)
