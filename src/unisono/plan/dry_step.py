"""A dry run of one step on a fake worker, which records saved activations and messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unisono.layout.accounting import CollectiveCall, CollectiveCounter, SavedTensors
from unisono.layout.fake_worker import FakeWorker
from unisono.layout.pipeline.pass_order import pass_order, set_gradient_sync
from unisono.layout.pipeline.stage import Stage, by_name
from unisono.tasks.task import Task
from unisono.tensors.batch import Batch
from unisono.trainer.evaluation import forward

MetaTensors = tuple[Tensor, ...]  # on the meta device


@dataclass(frozen=True)
class StepEstimate:
    """The memory and the messages of a worker in a step. Memory is in bytes.

    Args:
        activations: what one micro-batch saves for backward, as the sum of the maxima of this worker's stages.
        in_flight: the maximum that all micro-batches in flight save together.
        gathered: the maximum of unsharded parameters at one time.
        messages: each message, and how often it is sent.
        gradients: the bytes per element of each parameter's gradient, by name; without parameters that get none.
    """

    activations: int
    in_flight: int
    gathered: int
    messages: Mapping[CollectiveCall, int]
    gradients: Mapping[str, int]


@dataclass(frozen=True)
class WorkerLoad:
    """The work of a worker in a step.

    Args:
        task: the task; its loss runs under autocast if that is used.
        batch: a real micro-batch.
        micro_batches: the number of this worker's micro-batches in a step.
        autocast: the context of forward passes.
        arrives: the inputs of each pipeline stage, by its number; empty without a pipeline.
    """

    task: Task
    batch: Batch
    micro_batches: int
    autocast: Callable[[], Any]
    arrives: Mapping[int, MetaTensors]


def dry_step(worker: FakeWorker, work: WorkerLoad) -> StepEstimate:
    """Run one step of `worker`, and record its memory and messages.

    Raises:
        Exception: whatever the model's code raises on tensors without values.
    """
    worker.held.model.train()
    return _whole(worker, work) if worker.held.pipeline is None else _stages(worker, work)


def _whole(worker: FakeWorker, work: WorkerLoad) -> StepEstimate:
    """Run the first micro-batch, one for all those in between, and the last. These three send different messages if
    gradients are summed once per step."""
    held, kept, sent = worker.held, SavedTensors(), Counter[CollectiveCall]()
    activations = 0
    middle = work.micro_batches - 2
    before = [(1, False), (middle, False)][: work.micro_batches - 1]
    for times, last in (*before, (1, True)):
        messages, here = CollectiveCounter(), SavedTensors(kept.gathered)
        with worker.shapes(), messages:
            batch = worker.of(work.batch)
            with held.micro_batch_part(batch, work.task.loss) as (mine, loss):
                with here.counting(held.model):
                    found = loss(forward(work.task, work.autocast)(held.model, mine), mine)
                activations = activations or here.bytes
                held.unsharding.backward(last)
                found.backward()
        sent.update({message: count * times for message, count in messages.seen.items()})
    return StepEstimate(activations, activations, _gathered(kept), sent, _gradients(worker))


def _stages(worker: FakeWorker, work: WorkerLoad) -> StepEstimate:
    """Run the passes of a pipeline in the order of its schedule."""
    pipeline = worker.held.pipeline
    order = pass_order(pipeline.schedule, pipeline.count, work.micro_batches, pipeline.group)
    messages, waiting, sizes = CollectiveCounter(), dict[tuple[int, int], Any](), dict[tuple[int, int], int]()
    alive = most = 0
    kept = SavedTensors()
    last = {stage: max(i for i, turn in enumerate(order) if turn[0] == stage) for stage in pipeline.stages}
    with worker.shapes(), messages:
        for i, (number, m, is_backward) in enumerate(order):
            stage = pipeline.stages[number]
            if not is_backward:
                here = SavedTensors(kept.gathered)
                with here.counting(stage):
                    waiting[number, m] = _leaves(worker, work, stage, number)
                sizes[number, m] = here.bytes
                alive += here.bytes
            else:
                set_gradient_sync(stage, i == last[number])
                _backward(waiting.pop((number, m)))
                alive -= sizes[number, m]
            most = max(most, alive)
    activations = sum(max(size for (s, _), size in sizes.items() if s == number) for number in pipeline.stages)
    return StepEstimate(activations, most, _gathered(kept), messages.seen, _gradients(worker))


def _leaves(worker: FakeWorker, work: WorkerLoad, stage: Stage, number: int) -> list[Tensor]:
    """The outputs of a stage for a micro-batch; of the last stage, the loss."""
    arrived = [_arrived(worker, outline) for outline in work.arrives[number]]
    with work.autocast():
        batch = worker.of(work.batch)
        found = stage(*arrived, **by_name(stage.call_signature, work.task.inputs(batch)))
    if stage.is_last:
        return [work.task.loss(stage.assemble(found), batch)]
    return list(found)


def _arrived(worker: FakeWorker, outline: Tensor) -> Tensor:
    like: Tensor = worker.of(outline)
    return like.detach().requires_grad_(outline.requires_grad)


def _backward(leaves: list[Tensor]) -> None:
    learning = [value for value in leaves if value.requires_grad]
    if learning:
        torch.autograd.backward(learning, [torch.ones_like(value) for value in learning])


def _gathered(kept: SavedTensors) -> int:
    """The maximum of unsharded parameters in bytes: those of root modules, and of one other module at a time."""
    sizes = kept.gathered
    inner = {child for module in sizes for child in module.modules() if child is not module}
    return sum(sizes[m] for m in sizes if m not in inner) + max((sizes[m] for m in sizes if m in inner), default=0)


def _gradients(worker: FakeWorker) -> dict[str, int]:
    """The bytes per element of each gradient, by name. Removes the gradients from the parameters."""
    taken = {name: worker.held.take(name) for name in worker.held.leaves}
    return {name: gradient.element_size() for name, gradient in taken.items() if gradient is not None}


def stage_messages(arrives: Mapping[int, MetaTensors], stages: Mapping[int, Any], count: int, micro_batches: int,
            worker_of: Callable[[int], int], ranks: Callable[[int], int]) -> Counter[CollectiveCall]:  # fmt: skip
    """The messages between a worker's stages and those of other workers: outputs, and gradients of outputs."""
    found: Counter[CollectiveCall] = Counter()
    for number in stages:
        here = worker_of(number)
        if number + 1 < count and worker_of(number + 1) != here:
            pair = tuple(sorted((ranks(here), ranks(worker_of(number + 1)))))
            found[CollectiveCall("send", pair, sum(v.nbytes for v in arrives[number + 1]))] += micro_batches
        if number > 0 and worker_of(number - 1) != here:
            pair = tuple(sorted((ranks(here), ranks(worker_of(number - 1)))))
            back = sum(v.nbytes for v in arrives[number] if v.requires_grad)
            if back:
                found[CollectiveCall("send", pair, back)] += micro_batches
    return found


def with_messages(step: StepEstimate, more: Mapping[CollectiveCall, int]) -> StepEstimate:
    """`step`, which also sends `more`."""
    return replace(step, messages=Counter(step.messages) + Counter(more))
