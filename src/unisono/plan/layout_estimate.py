"""Estimates the memory and the messages of each worker under a layout, in one process without workers."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unisono.config import FIELDS, Config
from unisono.data import seed_compute, stream
from unisono.errors import InvalidInput, UnisonoError
from unisono.launch import WorkerContext
from unisono.layout import BlockOptions, RankMesh, Sample
from unisono.layout.accounting import CollectiveCall
from unisono.layout.deferred import record
from unisono.layout.expert import stub_mixtures
from unisono.layout.fake_worker import FakeWorker, fake_worker
from unisono.layout.pipeline import split
from unisono.layout.pipeline.p2p import meta_like
from unisono.layout.pipeline.schedules import worker_of
from unisono.layout.pipeline.stage import by_name
from unisono.layout.shape_propagation import PropagateShapes
from unisono.layout.shard_sizes import differing_axes, local_shape
from unisono.layout.stage_split import inputs_on
from unisono.notation import show
from unisono.plan.device_memory import DeviceMemory, memory_of
from unisono.plan.dry_step import MetaTensors, StepEstimate, WorkerLoad, dry_step, stage_messages, with_messages
from unisono.plan.layout_check import check_task
from unisono.plan.stepped import SteppedTensors, optimizer_bytes
from unisono.run.resolve import resolve_config
from unisono.run.spec import TaskSource
from unisono.sync import AllReduce
from unisono.tasks.task import Task
from unisono.trainer.build import autocast_of
from unisono.trainer.build_model import create_model
from unisono.trainer.data_feed import DataFeed
from unisono.trainer.device import choose_device
from unisono.trainer.evaluation import within

LOG = logging.getLogger("unisono")


@dataclass(frozen=True)
class Traffic:
    """The messages of one kind that a worker sends among the same ranks in a step.

    Args:
        axes: the axes on which those ranks differ, as ``shard`` or ``shard x context``; ``replica`` between replicas.
        kind: the kind of the messages; see `CollectiveCall`.
        count: the number of messages.
        bytes: the bytes that the worker sends with all of them.
    """

    axes: str
    kind: str
    count: int
    bytes: int


@dataclass(frozen=True)
class WorkerMemory:
    """The memory and messages of each of several workers for which these are equal. Memory is in bytes.

    Args:
        workers: the ranks of these workers.
        parameters, buffers, gradients, optimizer: the memory of a worker's parts between two steps.
        activations: what one micro-batch saves for backward.
        in_flight: the maximum that all micro-batches in flight save together.
        gathered: the maximum of unsharded parameters at one time.
        messages: the messages of a step.
    """

    workers: tuple[int, ...]
    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int
    in_flight: int
    gathered: int
    messages: tuple[Traffic, ...]

    @property
    def total(self) -> int:
        """An upper bound of the bytes at one time."""
        return self.parameters + self.buffers + self.gradients + self.optimizer + self.in_flight + self.gathered


@dataclass(frozen=True)
class LayoutEstimate:
    """The estimate of a layout.

    Args:
        layout: the layout as text.
        workers, replicas: the numbers of workers and replicas of the run.
        parameters: the number of elements of all parameters.
        micro_batch: the number of samples of a micro-batch.
        micro_batches: the number of micro-batches of each worker in a step.
        holdings: the memory of all workers, in the order of the first worker of each entry.
        notes: what stays whole and why, where stages begin, and what could not be estimated.
        memory: the memory of the machine, or of a worker's device.
    """

    layout: str
    workers: int
    replicas: int
    parameters: int
    micro_batch: int
    micro_batches: int
    holdings: tuple[WorkerMemory, ...]
    notes: tuple[str, ...]
    memory: DeviceMemory

    def mapping(self) -> dict[str, Any]:
        """The estimate as a JSON object."""
        found = asdict(self)
        for holding, each in zip(found["holdings"], self.holdings):
            holding["total"] = each.total
        return found


def estimate_mapping(worker: WorkerContext, source: TaskSource, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Run `estimate_layout`; returns the fields of the `LayoutEstimate`. Runs in a process of its own."""
    task = source.load(FIELDS)
    return estimate_layout(task, resolve_config(task, settings)).mapping()


def estimate_layout(task: Task, config: Config) -> LayoutEstimate:
    """Estimate the memory and messages of every worker. The process must have no default process group.

    Raises:
        InvalidInput: the task cannot be trained under this layout.
    """
    device = choose_device(config.device, 0)
    with contextlib.ExitStack() as stack:
        feed = DataFeed(task, config, 0, config.workers, stack)
        places, sample = feed.mesh, feed.sample()
        whole = check_task(task, config, places, sample)
        batch = feed.micro_batch()
    seed_compute(stream(config.seed, 0, 0, "init"))
    autocast = autocast_of(config, device)
    arrives: Mapping[int, MetaTensors] = {}
    if places.layout.pipeline > 1:
        cuts, arrives = _arrivals(task, batch, places, sample)
        places = RankMesh(replace(places.layout, cuts=cuts), places.workers)
    work = WorkerLoad(replace(task, loss=within(autocast, task.loss)), batch, len(feed.mine), autocast, arrives)
    setup = _Setup(task, config, places, sample, device, work, whole)
    notes: list[str] = []
    holdings: list[WorkerMemory] = []
    for at in range(places.layout.pipeline):
        rank = next(r for r in range(places.workers) if places.of(r).pipeline == at)
        with _captured_log(notes if rank == 0 else []):
            holdings += _fake_holdings(setup, rank, notes)
    model = record(partial(create_model, task)).model
    notes += _between_replicas(config, places)
    notes += _uncounted(config)
    return LayoutEstimate(
        show(config.layout), places.workers, places.replicas, sum(p.numel() for p in model.parameters()),
        feed.plan.micro_batch, len(feed.mine), tuple(_merged(holdings)), tuple(dict.fromkeys(notes)),
        memory_of(device))  # fmt: skip


@dataclass(frozen=True)
class _Setup:
    """What the estimates of all workers have in common.

    Args:
        whole: whether the optimizer steps sharded tensors whole.
    """

    task: Task
    config: Config
    places: RankMesh
    sample: Sample
    device: torch.device
    work: WorkerLoad
    whole: bool


def _fake_holdings(setup: _Setup, rank: int, notes: list[str]) -> list[WorkerMemory]:
    """Estimate on tensors without memory, or in memory if that fails."""
    options = BlockOptions(setup.config.precision, setup.config.activation_checkpointing)
    worker_of_rank = partial(
        fake_worker, partial(create_model, setup.task), setup.places, rank, setup.sample, setup.device, options
    )
    try:
        with worker_of_rank(memory=False) as worker:
            return _holdings(setup, rank, worker)
    except InvalidInput:
        raise
    except Exception as error:  # the model's own code may raise anything on tensors without values
        notes.append(f"computed with values, in memory, because shapes are not enough: {_first_line(error)}")
    try:
        with worker_of_rank(memory=True) as worker:
            return _holdings(setup, rank, worker)
    except UnisonoError:
        raise
    except Exception as error:
        raise InvalidInput("model", setup.task.name, f"forward or backward fails ({_first_line(error)})",
                           "check that it trains on one worker") from error  # fmt: skip


def _holdings(setup: _Setup, rank: int, worker: FakeWorker) -> list[WorkerMemory]:
    """The memory of all workers at the pipeline coordinate of `rank`."""
    places, held, step = setup.places, worker.held, dry_step(worker, setup.work)
    if held.pipeline is not None:
        step = with_messages(step, _crossing(places, rank, held, setup.work))
    if places.replicas > 1 and _sums(setup.config):
        summed = sum(shard_bytes(held.leaves[name], places, rank, width) for name, width in step.gradients.items())
        step = with_messages(step, {CollectiveCall("all-reduce", places.along(rank, "replica"), summed): 1})
    here = places.of(rank).pipeline
    alike: dict[tuple[Any, Any], list[int]] = defaultdict(list)
    for other in (r for r in range(places.workers) if places.of(r).pipeline == here):
        parts = {name: local_shape(leaf, places, other) for name, leaf in held.leaves.items()}
        stepped = SteppedTensors.wholes(held.leaves, places, other) if setup.whole else SteppedTensors.parts(parts)
        alike[tuple(parts.items()), stepped].append(other)
    return [_holding(setup.task, places, worker, step, dict(parts), stepped, workers)
            for (parts, stepped), workers in alike.items()]  # fmt: skip


def _holding(
    task: Task,
    places: RankMesh,
    worker: FakeWorker,
    step: StepEstimate,
    parts: Mapping[str, tuple[int, ...]],
    stepped: SteppedTensors,
    workers: list[int],
) -> WorkerMemory:
    leaves, step = worker.held.leaves, with_messages(step, Counter(stepped.messages))
    numbers = {name: torch.Size(part).numel() for name, part in parts.items()}
    return WorkerMemory(
        tuple(workers),
        sum(numbers[name] * leaf.element_size() for name, leaf in leaves.items()),
        sum(buffer.nbytes for buffer in worker.held.local.buffers()),
        sum(numbers[name] * width for name, width in step.gradients.items()),
        optimizer_bytes(task, worker, stepped, step.gradients),
        step.activations,
        step.in_flight,
        step.gathered,
        tuple(traffic(step.messages, places, "nccl" if worker.device.type == "cuda" else "gloo")),
    )


def _arrivals(
    task: Task, batch: Any, places: RankMesh, sample: Sample
) -> tuple[tuple[str, ...], dict[int, MetaTensors]]:
    """The names of the modules at which stages begin, and the inputs of each stage for a micro-batch.

    They are computed from the whole model. Stages are balanced by bytes, as no times are measured.
    """
    layout = places.layout
    model = record(partial(create_model, task)).model
    holders = [worker_of(layout.schedule, layout.pipeline, layout.stages, stage) for stage in range(layout.stages)]
    with stub_mixtures(model):
        given = inputs_on(model, sample.arguments)
        stages = split(model, given, layout.stages, layout.cuts or None, holders=holders)
        named = by_name(stages.modules[0].call_signature, inputs_on(model, task.inputs(batch)))
        found: dict[int, MetaTensors] = {0: ()}
        values: tuple[Tensor, ...] = ()
        for number, stage in enumerate(stages.modules[:-1]):
            with PropagateShapes():
                leaves = stage(*values, **named)
            found[number + 1] = tuple(map(meta_like, leaves))
            values = tuple(v.detach().requires_grad_(v.requires_grad) for v in leaves)
    return tuple(stages.cuts), found


def _crossing(places: RankMesh, rank: int, held: Any, work: WorkerLoad) -> Counter[CollectiveCall]:
    pipeline, row = held.pipeline, places.along(rank, "pipeline")
    on = partial(worker_of, pipeline.schedule, len(row), pipeline.count)
    found = stage_messages(work.arrives, pipeline.stages, pipeline.count, work.micro_batches, on, row.__getitem__)
    for name, stages in pipeline.tied.items():
        holders = tuple(sorted({row[on(stage)] for stage in stages}))
        if rank in holders and len(holders) > 1:
            size = shard_bytes(held.leaves[name], places, rank, held.leaves[name].element_size())
            found[CollectiveCall("send", holders, size)] += len(holders) - 1
    found.update(
        CollectiveCall("all-reduce", ranks, nbytes) for ranks, nbytes in pipeline.agreement_messages(work.micro_batches)
    )
    return found


def shard_bytes(leaf: Tensor, places: RankMesh, rank: int, width: int) -> int:
    """The bytes of the part of `leaf` on `rank`, with `width` bytes per element."""
    return torch.Size(local_shape(leaf, places, rank)).numel() * width


def traffic(messages: Mapping[CollectiveCall, int], places: RankMesh, backend: str) -> Iterator[Traffic]:
    """The counts and bytes of `messages`, added up for each combination of axes and kind."""
    found: dict[tuple[str, str], Counter[CollectiveCall]] = defaultdict(Counter)
    for message, count in messages.items():
        if len(message.ranks) > 1:
            found[" x ".join(differing_axes(message.ranks, places)), message.kind][message] += count
    for (wide, kind), some in sorted(found.items()):
        yield Traffic(
            wide, kind, some.total(), round(sum(message.sent(backend) * count for message, count in some.items()))
        )


def _merged(holdings: list[WorkerMemory]) -> list[WorkerMemory]:
    """Merge entries that differ only in their workers."""
    found: dict[WorkerMemory, list[int]] = defaultdict(list)
    for each in holdings:
        found[replace(each, workers=())] += each.workers
    joined = [replace(each, workers=tuple(sorted(workers))) for each, workers in found.items()]
    return sorted(joined, key=lambda each: each.workers)


def _sums(config: Config) -> bool:
    """Whether replicas sum their gradients in every step, uncompressed."""
    return config.sync == AllReduce() and show(config.compress) == "Cast()"


def _between_replicas(config: Config, places: RankMesh) -> list[str]:
    if places.replicas == 1 or _sums(config):
        return []
    how = f"{show(config.sync)} and {show(config.compress)}"
    return [f"messages between the {places.replicas} replicas depend on {how}, and are not included"]


def _uncounted(config: Config) -> list[str]:
    """Notes on requested settings that the estimate does not include."""
    left_out = {
        "a run balances stages by measured time, so its cuts may differ": (
            config.layout.pipeline > 1 and not config.layout.cuts
        ),
        "checkpointed blocks save their inputs, which activations do not include": config.activation_checkpointing
        != "none",
        "sync_batchnorm sends statistics, which messages do not include": config.sync_batchnorm,
    }
    return [words for words, applies in left_out.items() if applies]


@contextlib.contextmanager
def _captured_log(notes: list[str]) -> Iterator[None]:
    """A context that appends log messages, such as those of applying a layout, to `notes`."""

    class Appending(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.append(record.getMessage())

    handler, before = Appending(logging.INFO), LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOG.setLevel(before)
        LOG.removeHandler(handler)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
