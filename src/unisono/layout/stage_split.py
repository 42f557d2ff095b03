"""Splits a model into the stages of a pipeline, balanced by the costs of its blocks."""

from __future__ import annotations

import inspect
import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from unisono.layout.layout import Layout
from unisono.layout.pipeline import (
    CutPoints,
    Pipeline,
    by_name,
    cut_points,
    measure_segments,
    split,
    stages_of,
    worker_of,
)
from unisono.layout.repeated_blocks import BlockOptions
from unisono.layout.sample_batch import Sample
from unisono.tensors.batch import to_device

LOG = logging.getLogger("unisono")


def measure_costs(model: nn.Module, layout: Layout, mesh: DeviceMesh, sample: Sample) -> list[float] | None:
    """Collective: the seconds of each segment of a pipeline, as worker 0 measures them.

    None if the measurement fails, or if there are not more segments than stages.
    """
    found = cut_points(model, inputs_on(model, sample.arguments), (), layout.stages)
    seconds = torch.full([len(found.names) + 1], math.nan, dtype=torch.float64)
    if mesh.get_rank() == 0 and layout.stages < len(seconds):
        try:
            seconds = torch.tensor(_measured(found, torch.device(mesh.device_type), sample), dtype=torch.float64)
        except Exception as error:  # the model may raise anything on random values
            LOG.info("stages are balanced by bytes, as measuring their time failed: %s", error)
    seconds = seconds.to(mesh.device_type)
    dist.broadcast(seconds, 0)
    return None if seconds.isnan().any() else seconds.tolist()


def build_pipeline(
    model: nn.Module, layout: Layout, mesh: DeviceMesh, sample: Sample, costs: list[float] | None, compute: BlockOptions
) -> Pipeline:
    """This worker's stages: at the layout's cuts, else balanced by `costs`, else by bytes.

    Raises:
        InvalidInput: the model cannot be cut, or has fewer units than the layout has stages.
    """
    holders = [worker_of(layout.schedule, layout.pipeline, layout.stages, stage) for stage in range(layout.stages)]
    stages = split(
        model, inputs_on(model, sample.arguments), layout.stages, layout.cuts or None, costs, holders=holders
    )
    if mesh.get_rank() == 0:
        what = "time" if costs else "bytes"
        shares = ", ".join(f"{share:.0%}" for share in stages.shares)
        shares = shares and f"; shares of {what}: {shares}"
        LOG.info("the pipeline's stages begin at %s%s", ", ".join(stages.cuts), shares)
    mine = stages_of(layout.schedule, layout.pipeline, layout.stages, mesh.get_local_rank("pipeline"))
    return Pipeline(
        {number: stages.modules[number] for number in mine}, layout.stages, mesh["pipeline"].get_group(),
        layout.schedule, torch.device(mesh.device_type), stages.tied,
        split_backward=not compute.changes_backward)  # fmt: skip


def _measured(found: CutPoints, device: torch.device, sample: Sample) -> list[float]:
    inputs, batch = (to_device(each, device) for each in (sample.arguments, sample.batch))
    named = by_name(inspect.signature(found.model.forward), inputs)
    return measure_segments(found, named, device, lambda output: sample.loss(output, batch))


def inputs_on(model: nn.Module, inputs: Any) -> Any:
    """`inputs` on the model's device; unchanged for a model on the meta device."""
    device = next(model.parameters()).device
    return inputs if device.type == "meta" else to_device(inputs, device)
