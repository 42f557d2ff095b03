"""In which order a worker of a pipeline computes forward and backward passes: what its schedule says, as a list."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from unisono.layout.pipeline.schedules import kind, possible, stages_of

ScheduledPass = tuple[int, int, bool]  # a stage, a micro-batch, and whether it is the backward pass
_BACKWARD = ("B", "W")  # torch's letters for a whole backward pass, and for what is done last where it is divided


def pass_order(schedule: str, stages: int, micro_batches: int, group: dist.ProcessGroup) -> list[ScheduledPass]:
    """The turns of this worker of `group`, of which each backward pass is where its memory is free again."""
    workers, me = dist.get_world_size(group), dist.get_rank(group)
    while not possible(schedule, workers, stages, micro_batches):
        schedule = kind(schedule).fallback
    if not kind(schedule).multi_stage:
        return _single(schedule, stages, micro_batches, me)
    mine = [_stage(number, stages, group) for number in stages_of(schedule, workers, stages, me)]
    order = kind(schedule).torch(mine, micro_batches, loss_fn=lambda *_: None).pipeline_order[me]
    return [turn for action in order if action is not None for turn in _passes(action)]


def set_gradient_sync(stage: nn.Module, last: bool) -> None:
    """Before a backward pass: as torch's pipelines have it, sharded gradients are summed in the last one of a step."""
    if isinstance(stage, FSDPModule):
        stage.set_is_last_backward(last)
        stage.set_reshard_after_backward(last)
        stage.set_requires_gradient_sync(last)


def _single(schedule: str, stages: int, micro_batches: int, stage: int) -> list[ScheduledPass]:
    ahead = micro_batches if schedule == "GPipe" else min(micro_batches, stages - stage)
    order = [(stage, m, False) for m in range(ahead)]
    for m in range(micro_batches):
        order.append((stage, m, True))
        if ahead + m < micro_batches:
            order.append((stage, ahead + m, False))
    return order


def _passes(action: Any) -> list[ScheduledPass]:
    inside = getattr(action, "sub_actions", None)
    if inside:
        return [turn for each in inside for turn in _passes(each)]
    what = action.computation_type
    letter = what.value if isinstance(what.value, str) else str(what)  # its values were numbers once
    if letter != "F" and letter not in _BACKWARD:
        return []
    return [(action.stage_index, action.microbatch_index, letter != "F")]


def _stage(number: int, stages: int, group: dist.ProcessGroup) -> PipelineStage:
    nothing = (torch.empty(0, device="meta"),)
    return PipelineStage(nn.Identity(), number, stages, torch.device("cpu"), nothing, nothing, group=group)
