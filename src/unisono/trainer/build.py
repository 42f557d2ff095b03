"""A trainer, bound to the other workers of its view: for real workers and for virtual ones."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from unisono.compress import Exact
from unisono.config import Config
from unisono.data import Loader
from unisono.elastic.control_word import NUMBERS
from unisono.errors import InvalidInput
from unisono.layout import AXES, compiled
from unisono.tasks.task import batch_loss
from unisono.tensors.batch import Batch, samples_in, to_device
from unisono.trainer.build_model import compiled_whole
from unisono.trainer.compatibility import check_combination, may_drop_steps, why_equal_work
from unisono.trainer.context import RunContext
from unisono.trainer.evaluation import EvaluationSchedule, Evaluator, forward, within
from unisono.trainer.load_balance import LoadBalancer, RebalanceMode, WorkerClock
from unisono.trainer.loop import Trainer
from unisono.trainer.micro_batches import MicroBatchFunctions, MicroBatchRunner
from unisono.trainer.replica import Replica, ReplicaOptions
from unisono.trainer.step_validation import StepValidator


def build_trainer(context: RunContext, runner: Callable[..., MicroBatchRunner] = MicroBatchRunner) -> Trainer:
    """Collective: a trainer of ``context.state``.

    Args:
        runner: computes the micro-batches, where layers are not sharded over workers.

    Raises:
        InvalidInput: options of the run exclude each other.
        PeerLost: a worker was lost meanwhile; the model is as before.
    """
    config, feed, session = context.config, context.feed, context.session
    replica = _replica(context)
    with contextlib.ExitStack() as undo:  # a worker may be lost while channels are opened; the model is bound again
        undo.callback(replica.unhook)
        context.checkpointer.bind(replica)
        check_combination(config, feed.plan, feed.mesh, context.device, synchronous=replica.synchronous)
        functions, runner = _compute(context, runner)
        evaluation = EvaluationSchedule(_evaluator(context, functions), replica, context)
        loader = feed.loader(context.state.progress.steps)
        validator = StepValidator(
            replica, context.checkpointer, context.record, context.groups.world, samples=feed.plan.indices,
            nonfinite_samples=loader.nonfinite_samples, worker_of=feed.shares.worker_of,
            worker_name=session.worker_name,
            clips=config.clip is not None, compare_replicas_every=config.compare_replicas_every,
            counterparts=feed.mesh.alike)  # fmt: skip
        trainer = Trainer(
            context, replica, loader, runner(functions, replica, session, context.tracker), validator,
            _load_balancer(context, replica, loader), evaluation)  # fmt: skip
        undo.pop_all()
    return trainer


def _replica(context: RunContext) -> Replica:
    config, plan, state, groups = context.config, context.feed.plan, context.state, context.groups
    options = ReplicaOptions(
        plan.micro_batches, float(plan.global_batch), config.clip, config.overlap,
        control_width=NUMBERS * groups.world.size, lazy=not config.compile, may_drop=may_drop_steps(config),
        may_repeat=config.recovers_from_loss, group_may_grow=state.snapshot is not None)  # fmt: skip
    return Replica(state.local, state.optimizer, groups, config.sync, config.compress, options)


def _compute(
    context: RunContext, runner: Callable[..., MicroBatchRunner]
) -> tuple[MicroBatchFunctions, Callable[..., MicroBatchRunner]]:
    """What is computed for a micro-batch, and by which runner: one of a pipeline, where layers are sharded."""
    task, config, local = context.task, context.config, context.state.local
    autocast = autocast_of(config, context.device)
    called = compiled(local.model) if config.compile and compiled_whole(config) else local.model
    output = forward(task, autocast)
    if local.pipeline is not None:
        from unisono.trainer.pipeline_runner import PipelineRunner, pipeline_output  # imports more of torch

        runner = partial(PipelineRunner, pipeline=local.pipeline, inputs=task.inputs, autocast=autocast)
        output = pipeline_output(local.pipeline, task.inputs, autocast)
    functions = MicroBatchFunctions(
        forward=lambda _, batch: output(called, batch),
        loss=within(autocast, batch_loss(task)),
        weight=task.weight or samples_in,
        to_device=_mover(context.device),
        part=local.micro_batch_part,
        seed=config.seed,
    )
    return functions, runner


def _evaluator(context: RunContext, functions: MicroBatchFunctions) -> Evaluator | None:
    if context.task.evaluate is None:
        return None
    places, world = context.feed.mesh, context.groups.world
    here = places.of(world.rank)
    task = dataclasses.replace(context.task, loss=functions.loss)
    contributes = not any(getattr(here, axis) for axis in AXES if axis != "pipeline")
    return Evaluator(
        task, world.channel("evaluation"), functions.forward, functions.to_device, here.replica, places.replicas,
        contributes)  # fmt: skip


def _load_balancer(context: RunContext, replica: Replica, loader: Loader) -> LoadBalancer:
    """Work follows speeds where that is possible, if the user says so or would not see it in the result."""
    config, device, world = context.config, context.device, context.groups.world
    reason = why_equal_work(config, synchronous=replica.synchronous)
    if config.balance == "on" and reason:
        raise InvalidInput("balance", config.balance, reason, "leave it out")
    mode = RebalanceMode.YES if config.balance == "on" else RebalanceMode.NO
    if config.balance == "auto" and not reason:  # in exact mode no bit depends on which worker computes what
        mode = RebalanceMode.YES if isinstance(config.compress, Exact) else RebalanceMode.IF_ASKED
    queues = device.type == "cuda" and mode is RebalanceMode.YES
    clock = WorkerClock(
        world.now,
        waited=lambda: replica.waited_seconds,
        fetching=lambda: loader.ahead_seconds,
        synchronize=torch.cuda.current_stream(device).synchronize if queues else lambda: None,
    )
    return LoadBalancer(
        context.feed.shares, mode, world.rank, context.record, clock, context.session.worker_name,
        config.remove_slower_than)  # fmt: skip


def autocast_of(config: Config, device: torch.device) -> Callable[[], Any]:
    """The context of forward passes and losses."""
    if config.precision == "bf16":
        return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext


def _mover(device: torch.device) -> Callable[[Batch], Batch]:
    """Copies a batch to `device`; what is on the CPU stays there without a copy."""
    return (lambda batch: batch) if device.type == "cpu" else partial(to_device, device=device)
