"""The order of a pipeline worker's forward and backward passes under its schedule, as a list."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from unisono.layout.pipeline.schedules import kind, possible, stages_of

ScheduledPass = tuple[int, int, bool]  # a stage, a micro-batch, and whether it is the backward pass
_BACKWARD = ("B", "W")  # torch's codes for a whole backward pass, and for the last part of a split one


def pass_order(schedule: str, stages: int, micro_batches: int, group: dist.ProcessGroup) -> list[ScheduledPass]:
    """The passes of one step on this worker of `group`, in order.

    A backward pass in two parts is listed where its last part runs, which frees its memory.
    """
    workers, me = dist.get_world_size(group), dist.get_rank(group)
    while not possible(schedule, workers, stages, micro_batches):
        schedule = kind(schedule).fallback
    if not kind(schedule).multi_stage:
        return _single(schedule, stages, micro_batches, me)
    mine = [_stage(number, stages, group) for number in stages_of(schedule, workers, stages, me)]
    order = kind(schedule).torch(mine, micro_batches, loss_fn=lambda *_: None).pipeline_order[me]
    return [scheduled for action in order if action is not None for scheduled in _passes(action)]


def set_gradient_sync(stage: nn.Module, last: bool) -> None:
    """Configure FSDP before a backward pass of `stage`.

    FSDP reduces gradients and reshards parameters only if `last`, that is, in the last backward pass of a step. torch's
    pipelines configure it in the same way. A stage that is not sharded is left alone.
    """
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
        return [scheduled for each in inside for scheduled in _passes(each)]
    what = action.computation_type
    code = what.value if isinstance(what.value, str) else str(what)  # older versions of torch have numbers as values
    if code != "F" and code not in _BACKWARD:
        return []
    return [(action.stage_index, action.microbatch_index, code != "F")]


def _stage(number: int, stages: int, group: dist.ProcessGroup) -> PipelineStage:
    nothing = (torch.empty(0, device="meta"),)
    return PipelineStage(nn.Identity(), number, stages, torch.device("cpu"), nothing, nothing, group=group)
