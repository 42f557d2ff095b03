"""A trainer put together from a task, a configuration and a communicator, for real workers and for virtual ones."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from unisono.bad_steps import RollBack, Stop
from unisono.comm import Communicator
from unisono.comm.process_groups import ProcessGroups
from unisono.comm.text import gather_text
from unisono.compress import Exact
from unisono.config import Config
from unisono.data import Loader, MicroBatchAllocation, MicroBatchPlan, assign, most_ahead, seed_compute, stream
from unisono.elastic.control_word import NUMBERS
from unisono.elastic.recovery import Recovery, ReplicatedRecovery
from unisono.elastic.session import Session, StaticSession
from unisono.elastic.training_state import TrainingState
from unisono.errors import InvalidInput
from unisono.layout import AXES, SHARDING_AXES, BlockOptions, LocalModel, RankMesh, Sample, as_it_is, blocks, compiled
from unisono.notation import show
from unisono.observe import ActivityTracker, NullTracker, Recorder
from unisono.sync import AllReduce
from unisono.tasks.lr_schedules import Constant, factor_of
from unisono.tasks.task import Task, batch_loss, build_dataset
from unisono.tensors.batch import Batch, samples_in, to_device
from unisono.trainer.checkpointing import Checkpointer
from unisono.trainer.evaluation import Evaluator, forward, within
from unisono.trainer.load_balance import LoadBalancer, RebalanceMode
from unisono.trainer.loop import Trainer
from unisono.trainer.optimizer import LearningRate, optimizer_of, prefer_fused
from unisono.trainer.optimizer_coupling import needs_wholes
from unisono.trainer.replica import Replica, check_fit, check_trainable
from unisono.trainer.step_validation import StepValidator
from unisono.trainer.sync_batchnorm import synchronize_batchnorm
from unisono.trainer.whole_tensor_optimizers import Wholes

LOG = logging.getLogger("unisono")


class DataFeed:
    """The plan of micro-batches, and the loader of worker `rank` of `size`; loaders are closed with `stack`.

    Args:
        notice: see `Loader`.

    Raises:
        InvalidInput: as `MicroBatchPlan`, `assign` and `RankMesh`.
    """

    def __init__(
        self,
        task: Task,
        config: Config,
        rank: int,
        size: int,
        stack: contextlib.ExitStack,
        notice: Callable[[str], None] = LOG.warning,
    ) -> None:
        self.task, self.config, self._stack, self._notice = task, config, stack, notice
        self.dataset = build_dataset(task.data)
        assert config.global_batch is not None
        self.plan = MicroBatchPlan(len(self.dataset), config.global_batch, config.micro_batch, config.seed)
        self.places = RankMesh(config.layout, size)
        self.places.check_micro_batches(self.plan.micro_batches)
        ranges = assign(self.plan.micro_batches, [1.0] * self.places.data_parallel_size)
        self.mine = ranges[self.places.data_parallel_rank(rank)]  # of the first steps
        speakers = {self.places.data_parallel_rank(rank): rank for rank in reversed(range(size))}
        who = [speakers[lane] for lane in range(len(ranges))]
        self.shares = MicroBatchAllocation(ranges, self.places.data_parallel_rank(rank), who, most_ahead(config.load))
        epochs = config.epochs or 1.0
        self.steps = config.steps or self.plan.steps_in(epochs)
        self.left_out = "" if config.steps else self.plan.left_out(epochs)  # in words

    def sample(self) -> Sample:
        """The dataset's first two samples, or a micro-batch where it is measured; no random stream moves."""
        count = self.config.micro_batch if self.config.layout.pipeline > 1 else 2
        assert count is not None
        with torch.random.fork_rng(devices=[]):
            first = [self.dataset[i] for i in range(min(count, len(self.dataset)))]
        task = self.task
        return Sample((task.collate or default_collate)(first), task.inputs, task.loss, task.weight)

    def micro_batch(self) -> Batch:
        """As many of the dataset's first samples as a micro-batch has; no random stream moves."""
        with torch.random.fork_rng(devices=[]):
            many = getattr(self.dataset, "__getitems__", None)
            first = list(range(self.plan.micro_batch))
            samples = many(first) if many else [self.dataset[i] for i in first]
        return (self.task.collate or default_collate)(samples)

    def loader(self, first_step: int) -> Loader:
        """Loads this worker's micro-batches from `first_step` on."""
        loader = Loader(
            self.dataset, self.plan, self.shares.mine, self.task.collate, self.config.load, self.config.seed,
            range(first_step, self.steps), self._notice)  # fmt: skip
        self._stack.callback(loader.close)
        return loader


def build(
    task: Task, config: Config, device: torch.device, comm: Communicator, mesh: Any = None,
    sample: Sample | None = None, inside: Communicator | None = None,
) -> tuple[LocalModel, Optimizer]:  # fmt: skip
    """What this worker holds of the model, with its first weights, and the optimizer of that.

    Args:
        comm: of the workers that compute micro-batches side by side.
        mesh: a DeviceMesh of all workers, where a replica lies on several.
        sample: there, what it may be tried on.
        inside: there, of the workers of a replica.

    Raises:
        InvalidInput: what the task builds cannot be trained.
    """
    lane = comm.channel("batchnorm") if config.sync_batchnorm else None
    change = partial(synchronize_batchnorm, comm=lane) if lane else as_it_is
    compute = BlockOptions(
        config.precision, config.activation_checkpointing, config.compile, _compiled_whole(config), change
    )
    seed_compute(stream(config.seed, 0, 0, "init"))
    if mesh is not None and sample is not None:
        from unisono.layout.parallelize import parallelize  # imports more of torch than others need

        held = parallelize(lambda: model_of(task), config.layout, mesh, sample, compute)
    else:
        model = compute.change(model_of(task))
        compute.check(model)
        for block in blocks(model):
            compute.prepare(block)
        held = LocalModel.whole(model.to(device))
    wholes = _wholes(task, config, held, device, mesh, inside) if mesh is not None and inside is not None else None
    if wholes is None:
        optimizer = optimizer_of(task.optimizer, [p for p in held.local.parameters() if p.requires_grad])
    else:
        held, optimizer = dataclasses.replace(held, stepping=wholes), wholes.optimizer
    check_fit(held.local, optimizer)
    prefer_fused(optimizer, sparse=bool(held.sparse))
    return held, optimizer


def _wholes(
    task: Task, config: Config, held: LocalModel, device: torch.device, mesh: Any, inside: Communicator
) -> Wholes | None:
    """Where the optimizer needs tensors whole, and workers have parts; all workers of a replica call it alike."""
    mine = json.dumps([p.dim() for p in held.local.parameters() if p.requires_grad])
    dims = {dim for text in gather_text(inside, mine) for dim in json.loads(text)}
    if not needs_wholes(task.optimizer, dims, config.layout, device):
        return None
    places, rank = RankMesh(config.layout, mesh.size()), mesh.get_rank()
    replica = places.along(rank, *AXES)
    group = [replica.index(other) for other in places.along(rank, *SHARDING_AXES)]
    lane = inside.channel("whole tensors")
    return Wholes(task.optimizer, held.local, held.parts, lane, group, undo=config.recovers_from_loss)


def _check_offloaded(config: Config, places: RankMesh, device: torch.device) -> None:
    if config.layout.offload and device.type != "cpu" and places.replicas > 1:
        raise InvalidInput(
            "layout", show(config.layout), f"gradients lie in host memory, and {places.replicas} replicas exchange "
            "them on the device",
            f"write --workers {config.layout.workers}, or use replicate in place of replicas")  # fmt: skip


def _compiled_whole(config: Config) -> bool:
    """Else block by block: between blocks others have to have a hand in what is computed."""
    return config.layout.workers == 1 and config.activation_checkpointing == "none"


def model_of(task: Task) -> nn.Module:
    """What the task builds. Raises `InvalidInput` if it cannot be trained."""
    model = task.model()
    if not isinstance(model, nn.Module):
        raise InvalidInput(
            "model", type(model).__name__, "not a torch module", "give Task(model=a function that builds one)"
        )
    check_trainable(model)
    return model


def bind(
    task: Task,
    config: Config,
    feed: DataFeed,
    state: TrainingState,
    wires: ProcessGroups,
    *,
    persistence: Checkpointer,
    record: Recorder,
    device: torch.device,
    session: Session | None = None,
    recovery: Recovery | None = None,
    trainer: Callable[..., Trainer] = Trainer,
    watch: ActivityTracker = NullTracker(),
) -> Trainer:
    """A `trainer` of `state`, which is bound to the other workers.

    Raises:
        InvalidInput: what is asked for cannot be combined.
    """
    comm, held, optimizer = wires.world, state.local, state.optimizer
    session = session or StaticSession()
    replica = Replica(
        held.local, optimizer, wires.dp_replicate, held=held, wires=wires, sync=config.sync, compress=config.compress,
        micro_batches=feed.plan.micro_batches,
        reference=float(feed.plan.global_batch), clip=config.clip, overlap=config.overlap,
        extra=NUMBERS * comm.size, lazy=not config.compile, drops=drops(config),
        repeats=config.recovers_from_loss, awaits=state.snapshot is not None)  # fmt: skip
    with (
        contextlib.ExitStack() as undo
    ):  # a worker may be lost while lanes are opened, and the model is bound again then
        undo.callback(replica.unhook)
        persistence.bind(replica)
        _check_concurrent(config, feed.plan, feed.places.data_parallel_size, replica)
        _check_dropping(config, replica)
        _check_offloaded(config, feed.places, device)
        schedule = config.schedule or task.schedule or Constant()
        autocast = autocast_of(config, device)
        task = dataclasses.replace(task, loss=within(autocast, batch_loss(task)))
        runs = forward(task, autocast)
        called = compiled(held.model) if config.compile and _compiled_whole(config) else held.model
        move = _mover(device)
        if held.pipeline is not None:
            from unisono.trainer.pipeline_loop import PipelinedTrainer, output  # imports more of torch than others need

            trainer = partial(PipelinedTrainer, pipeline=held.pipeline, inputs=task.inputs, autocast=autocast)
            runs = output(held.pipeline, task.inputs, autocast)
        evaluator = None
        if task.evaluate is not None:
            here = feed.places.of(comm.rank)
            evaluator = Evaluator(
                task, comm.channel("evaluation"), runs, move, here.replica, feed.places.replicas,
                not any(getattr(here, axis) for axis in AXES if axis != "pipeline"))  # fmt: skip
        loader = feed.loader(state.progress.steps)
        guard = StepValidator(
            replica, persistence, record, comm, samples=feed.plan.indices, flawed=loader.nonfinite_samples,
            worker_of=feed.shares.worker_of, name_of=session.worker_name, clips=config.clip is not None,
            compare_replicas_every=config.compare_replicas_every, places=feed.places.alike)  # fmt: skip
        made = trainer(
            model=held.model,
            replica=replica,
            loader=loader,
            comm=comm,
            record=record,
            checkpointer=persistence,
            learning_rate=LearningRate(optimizer, config.lr),
            evaluator=evaluator,
            forward=lambda _, batch: runs(called, batch),
            loss=task.loss,
            micro_batch_part=held.micro_batch_part,
            weight=task.weight or samples_in,
            to_device=move,
            seed=config.seed,
            validator=guard,
            load_balancer=_balance(config, feed, replica, loader, comm, record, device, session),
            lr_factor=lambda t: factor_of(schedule, t, feed.steps),
            steps=feed.steps,
            global_batch=feed.plan.global_batch,
            evaluate_every=config.evaluate_every,
            session=session,
            state=state,
            recovery=recovery or ReplicatedRecovery(persistence.judge),
            tracker=watch,
        )
        undo.pop_all()
    return made


def drops(config: Config) -> bool:
    """Whether steps of such a run may be dropped."""
    return not isinstance(config.bad_step, Stop) or config.compare_replicas_every > 0


def _check_dropping(config: Config, replica: Replica) -> None:
    sync = show(config.sync)
    if drops(config) and not replica.synchronous:
        field = "compare_replicas_every" if isinstance(config.bad_step, Stop) else "bad_step"
        raise InvalidInput(
            field, show(getattr(config, field)), f"with {sync} replicas walk by themselves, and no step is all "
            "workers' together", "leave it out, or use AllReduce()")  # fmt: skip
    together = isinstance(config.sync, AllReduce)
    if config.compare_replicas_every and not together:
        raise InvalidInput("compare_replicas_every", config.compare_replicas_every,
                           f"with {sync} workers do not keep the state",
                           "leave it out, or use AllReduce()")  # fmt: skip
    if isinstance(config.bad_step, RollBack) and not (together and config.layout.workers == 1):
        raise InvalidInput(
            "bad_step", show(config.bad_step), "only whole replicas that keep their state themselves go back while "
            "they run", "write Skip(), or use AllReduce() without a layout")  # fmt: skip


def _balance(
    config: Config,
    feed: DataFeed,
    replica: Replica,
    loader: Loader,
    comm: Communicator,
    record: Recorder,
    device: torch.device,
    session: Session,
) -> LoadBalancer:
    """Shares follow speeds where that can be, and the user says so or would not see it in the result."""
    if config.balance == "on" and (reason := _alike(config, replica)):
        raise InvalidInput("balance", config.balance, reason, "leave it out")
    follow = RebalanceMode.YES if config.balance == "on" else RebalanceMode.NO
    if config.balance == "auto" and not _alike(config, replica):  # in exact mode no bit depends on who computes what
        follow = RebalanceMode.YES if isinstance(config.compress, Exact) else RebalanceMode.IF_ASKED
    queues = device.type == "cuda" and follow is RebalanceMode.YES
    finish = torch.cuda.current_stream(device).synchronize if queues else lambda: None
    return LoadBalancer(
        feed.shares, follow, comm.rank, record, comm.now, lambda: replica.waited_seconds, lambda: loader.ahead_seconds,
        finish, session.worker_name, config.remove_slower_than)  # fmt: skip


def _alike(config: Config, replica: Replica) -> str:
    """Why all workers have to compute as many micro-batches as each other, or that somebody else deals them out; empty
    if they need not."""
    if config.layout.workers > 1:
        return "workers compute a micro-batch together, or as many of them side by side"
    if config.sync_batchnorm:
        return "with sync_batchnorm all workers compute as many micro-batches, side by side"
    if not replica.synchronous:
        return f"with {show(config.sync)} each worker takes steps of its own, as fast as it can"
    if getattr(config.sync, "reduce", "mean") != "mean":
        return f"with {show(config.sync)} a worker's micro-batches count as one, however many they are"
    return ""


def _check_concurrent(config: Config, plan: MicroBatchPlan, lanes: int, replica: Replica) -> None:
    if config.sync_batchnorm and not replica.synchronous:
        raise InvalidInput(
            "sync_batchnorm", True, f"with {show(config.sync)} workers do not compute side by side",
            "leave it out, or use AllReduce()")  # fmt: skip
    if config.sync_batchnorm and plan.micro_batches % lanes:
        raise InvalidInput(
            "sync_batchnorm", True, f"{lanes} workers cannot compute the {plan.micro_batches} micro-batches of a "
            "step side by side",
            f"choose global_batch and micro_batch so that their number divides by {lanes}")  # fmt: skip


def autocast_of(config: Config, device: torch.device) -> Callable[[], Any]:
    """The context of forward passes and losses."""
    if config.precision == "bf16":
        return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext


def _mover(device: torch.device) -> Callable[[Batch], Batch]:
    """Brings a batch to `device`; what is on the CPU stays there without a copy."""
    return (lambda batch: batch) if device.type == "cpu" else partial(to_device, device=device)
