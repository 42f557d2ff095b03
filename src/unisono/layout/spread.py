"""A model changed in place, axis by axis, so that this worker computes its part."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from unisono.layout.blocks import Compute, blocks
from unisono.layout.context import Passage
from unisono.layout.expert import derive as derive_experts
from unisono.layout.expert import split as split_experts
from unisono.layout.expert import standing_in
from unisono.layout.held import Gathering, Held
from unisono.layout.layout import Layout
from unisono.layout.pipeline import Pipeline
from unisono.layout.sample import Sample
from unisono.layout.shard import Gathered, shard
from unisono.layout.staged import costs_of, staged
from unisono.layout.tensor import TensorPlan, apply, derive, given, refusal

LOG = logging.getLogger("unisono")


@dataclass(frozen=True)
class Spread:
    """This worker's modules, its pipeline if there is one, the names of what is split over the tensor axis, and what of
    all this is whole for a while."""

    model: nn.Module
    pipeline: Pipeline | None
    matrices: Collection[str]
    gathering: Gathering

    def held(self, layout: Layout, mesh: DeviceMesh, sample: Sample) -> Held:
        """Once the numbers are to come, or there."""
        leaves = _leaves(self.model, self.pipeline)
        counted = set(self.pipeline.counted()) if self.pipeline else leaves.keys()
        if mesh.get_local_rank("tensor") != 0:
            counted &= set(self.matrices)
        if mesh.get_local_rank("replicate") != 0:
            counted = set()
        buffers = dict(self.model.named_buffers())
        if self.pipeline:
            buffers = {n: b for stage in self.pipeline.stages.values() for n, b in stage.whole_buffers().items()}
        held = Held.of(self.model, leaves, buffers, elsewhere=leaves.keys() - counted)
        held = replace(held, pipeline=self.pipeline, gathering=self.gathering)
        return replace(held, passage=Passage(mesh["context"], sample.weight)) if layout.context > 1 else held


def spread(
    model: nn.Module, layout: Layout, mesh: DeviceMesh, sample: Sample, compute: Compute, *, measured: bool = True
) -> Spread:
    """Change `model` in place.

    Args:
        measured: whether stages of a pipeline are cut by the time that they take.

    Raises:
        InvalidInput: the model does not allow it; names what, and what to do.
    """
    mixtures = derive_experts(model, layout.expert) if layout.expert > 1 else None
    with standing_in(model):
        measured = measured and layout.pipeline > 1 and not layout.cuts
        costs = costs_of(model, layout, mesh, sample) if measured else None
        if layout.tensor > 1:
            apply(model, mesh["tensor"], _plan(model, layout, mesh, sample))
        compute.check(model)
        repeated = set(blocks(model))
        pipeline = staged(model, layout, mesh, sample, costs, compute) if layout.pipeline > 1 else None
    # A stage stays the module that it is: what is replaced lies within.
    pieces = [compute.change(piece) for piece in (pipeline.stages.values() if pipeline else [model])]
    here = nn.ModuleList(pieces) if pipeline else pieces[0]
    matrices = {name for name, p in _leaves(here, pipeline).items() if isinstance(p, DTensor)}
    experts = split_experts(here, mesh["expert"], mixtures) if mixtures else []
    for block in [m for piece in pieces for m in piece.modules() if m in repeated]:
        compute.prepare(block)
    _shard(pieces, experts, layout, mesh, compute, repeated)
    return Spread(here, pipeline, matrices, Gathered(pieces, layout))


def _shard(
    pieces: Sequence[nn.Module],
    experts: Sequence[nn.Module],
    layout: Layout,
    mesh: DeviceMesh,
    compute: Compute,
    repeated: Collection[nn.Module],
) -> None:
    bf16 = compute.precision == "bf16_parameters"
    if layout.offload and mesh.device_type == "cpu" and mesh.get_rank() == 0:
        LOG.info("nothing is offloaded: the device is a CPU, and all lies in its memory")
    if layout.together == 1 and not layout.offload and not bf16:
        return
    # Gradients of experts are of all the expert axis' micro-batches already. Over one worker they are not sharded: most
    # of a model would be copied in every pass.
    rest = _sharding(layout, mesh, "shard", "context")
    for module in experts if rest.size() > 1 or layout.offload or bf16 else ():
        shard(module, rest, (), layout, bf16=bf16, last=False)
    apart = {p for module in experts for p in module.parameters()}
    for piece in pieces:
        last = getattr(piece, "is_last", True)
        row = _sharding(layout, mesh, "shard", "expert", "context")
        shard(piece, row, repeated, layout, bf16=bf16, last=last, apart=apart)


def _sharding(layout: Layout, mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """The workers that differ on these axes as one row, those whose gradients add up; in as many rows as there are
    copies of them."""
    wide = tuple(axis for axis in axes if getattr(layout, axis) > 1) or axes[:1]
    row = mesh[wide[0]] if len(wide) == 1 else mesh[wide]._flatten("_".join(wide))
    return DeviceMesh._concatenate([mesh["replicate"], row]) if layout.replicate > 1 else row


def _leaves(model: nn.Module, pipeline: Pipeline | None) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters()) if pipeline is None else pipeline.parameters()


def _plan(model: nn.Module, layout: Layout, mesh: DeviceMesh, sample: Sample) -> TensorPlan:
    """What the user says, or else what can be found."""
    if layout.plan:
        plan = given(model, layout.tensor, layout.plan, sample.arguments)
    else:
        refusal(model, layout.tensor)
        plan = derive(model, layout.tensor, sample.arguments)
    if mesh.get_rank() == 0:
        _tell(plan)
    return plan


def _tell(plan: TensorPlan) -> None:
    said = (f"{n} ({'; '.join(filter(None, [word, plan.because.get(n)]))})" for n, word in plan.split.items())
    LOG.info("split over the tensor axis: %s", ", ".join(said) or "nothing")
    for name, why in plan.whole.items():
        LOG.info("%s stays whole: %s", name or "the model itself", why)
