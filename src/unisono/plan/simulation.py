"""Forecasts a run by the real trainer and synchronizer, on virtual workers and a virtual clock.

Weights, losses and bytes are real: the same that processes would compute and send. The time is simulated: `Compute`
gives the time of computation, and `unisono.comm.link_model` the time of messages. The simulated time includes neither
compression, nor loading of data, nor evaluation.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from unisono.checkpoint import fingerprint
from unisono.comm import Link, Simulated, simulate
from unisono.comm.process_groups import ProcessGroups
from unisono.config import Config
from unisono.data import Inline
from unisono.elastic.model_state import weights_of
from unisono.elastic.training_state import TrainingState
from unisono.errors import UnisonoError, WorkerFailed
from unisono.observe.recorder import Fields
from unisono.plan.compute_time import Compute, quantiles
from unisono.plan.paced_runner import ClockPacer, PacedRunner
from unisono.tasks.task import Task, with_data
from unisono.trainer.build import build_trainer
from unisono.trainer.build_model import build_model
from unisono.trainer.checkpoint_restorer import CheckpointScope
from unisono.trainer.checkpointing import Checkpointer
from unisono.trainer.context import RunContext
from unisono.trainer.data_feed import DataFeed

_PATIENCE_SECONDS = 1e9  # of virtual time: a slow link must not count as a lost worker
OnProgress = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Cluster:
    """The links of workers, one for all or one each, and their compute times.

    Args:
        share_samples: the number of samples of the share whose time is `compute`; None: ``global_batch / workers`` of
            the simulated run.
    """

    links: tuple[Link, ...]
    compute: Compute
    share_samples: float | None = None

    def link(self, workers: int) -> Sequence[Link]:
        """One link for each of `workers`."""
        return self.links * workers if len(self.links) == 1 else self.links


@dataclass(frozen=True)
class Point:
    """The state after `step` steps: seconds since the start, the largest number of bytes that a worker has sent, and
    the training loss (the mean over workers, where each worker knows only its own)."""

    step: int
    seconds: float
    bytes: int
    loss: float


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run.

    Args:
        seconds: the time of all steps.
        step_seconds_median, step_seconds_low, step_seconds_high: the time from the end of a step to the end of the
            next, where a step ends when its last worker ends it. Eight of ten steps are between low and high.
        waiting: the share of the workers' time in which they do not compute, but wait for a link or for each other.
        bytes_per_worker: the largest number of bytes that a worker has sent.
        loss: the loss of the last step.
        metrics: the metrics of the final evaluation.
        weights_sha256: as in `Result`.
    """

    steps: int
    seconds: float
    step_seconds_median: float
    step_seconds_low: float
    step_seconds_high: float
    waiting: float
    bytes_per_worker: int
    loss: float
    metrics: Mapping[str, float]
    weights_sha256: str
    points: tuple[Point, ...] = field(repr=False)

    @property
    def steps_per_second(self) -> float:
        """The mean number of steps per second over the whole run."""
        return self.steps / self.seconds if self.seconds else math.inf


def forecast(task: Task, config: Config, cluster: Cluster, tell: OnProgress = lambda message: None) -> Forecast:
    """Train `task` with `config` on virtual workers; settings for processes, disks and devices are ignored.

    Args:
        tell: called with progress messages, as for `unisono.observe.display.Display`.

    Raises:
        InvalidInput: the task cannot be trained with this configuration.
        Diverged: the loss is not finite.
        WorkerFailed: the user's code raised an exception.
    """
    task, config = with_data(task), replace(config, load=Inline(), checkpoint_every=0, device="cpu")
    with contextlib.ExitStack() as stack:
        DataFeed(task, config, 0, config.workers, stack)  # raises errors of the plan before threads start
    traces = simulate(
        config.workers, _run_worker, task, config, cluster, tell, link=cluster.link(config.workers),
        seed=config.seed, timeout_seconds=_PATIENCE_SECONDS)  # fmt: skip
    return summarize(traces)


@dataclass(frozen=True)
class WorkerTrace:
    """The record of one virtual worker: the points of its steps, with its own bytes and losses, and totals."""

    points: Sequence[Point]
    seconds: float
    busy_seconds: float
    bytes: int
    metrics: Mapping[str, float]
    weights_sha256: str


def summarize(traces: Sequence[WorkerTrace]) -> Forecast:
    """The forecast from the traces of all workers."""
    points = _points([point for trace in traces for point in trace.points])
    ends = [0.0, *(point.seconds for point in points)]
    low, median, high = quantiles([after - before for before, after in pairwise(ends)], 0.1, 0.5, 0.9)
    seconds = max(trace.seconds for trace in traces)
    passed = sum(trace.seconds for trace in traces)
    return Forecast(
        steps=points[-1].step,
        seconds=seconds,
        step_seconds_median=median,
        step_seconds_low=low,
        step_seconds_high=high,
        waiting=max(0.0, 1 - sum(trace.busy_seconds for trace in traces) / passed) if passed else 0.0,
        bytes_per_worker=max(trace.bytes for trace in traces),
        loss=points[-1].loss,
        metrics=traces[0].metrics,
        weights_sha256=traces[0].weights_sha256,
        points=tuple(points),
    )


def _points(seen: Sequence[Point]) -> list[Point]:
    """One point per step. A step ends when its last worker has ended it and all earlier ones."""
    by_step: dict[int, list[Point]] = {}
    for point in seen:
        by_step.setdefault(point.step, []).append(point)
    merged = [
        Point(step, max(p.seconds for p in group), max(p.bytes for p in group), _mean([p.loss for p in group]))
        for step, group in sorted(by_step.items())
    ]
    return list(
        accumulate(merged, lambda a, b: replace(b, seconds=max(a.seconds, b.seconds), bytes=max(a.bytes, b.bytes)))
    )


def _mean(values: Sequence[float]) -> float:
    return values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)


class _TraceRecorder:
    """The `Recorder` of a virtual worker."""

    def __init__(self, comm: Simulated, global_batch: int, tell: OnProgress) -> None:
        self._comm, self._global_batch, self._tell = comm, global_batch, tell
        self._began, self._sent = comm.now(), comm.bytes_sent
        self._metrics: Mapping[str, float] = {}
        self.points: list[Point] = []

    @property
    def bytes(self) -> int:
        """The bytes that the worker has sent since the creation of this recorder."""
        return self._comm.bytes_sent - self._sent

    def event(self, event: str, /, **fields: Any) -> None:
        """See `Recorder`."""

    def step(self, step: int, steps: int, fields: Callable[[], Fields]) -> None:
        seconds, loss = self._comm.now() - self._began, fields()["loss"]
        self.points.append(Point(step, seconds, self.bytes, loss))
        rate = step * self._global_batch / seconds if seconds else math.inf
        self._tell({"kind": "progress", "step": step, "steps": steps, "loss": loss, "samples_per_second": rate,
                    "metrics": self._metrics})  # fmt: skip

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._metrics = dict(values)

    def close(self) -> None:
        """See `Recorder`."""


def _run_worker(comm: Simulated, task: Task, config: Config, cluster: Cluster, tell: OnProgress) -> WorkerTrace:
    """The body of one virtual worker."""
    try:
        with contextlib.ExitStack() as stack:
            return _train(comm, task, config, cluster, tell, stack)
    except UnisonoError:
        raise
    except Exception as error:
        raise WorkerFailed(comm.rank, f"{type(error).__name__}: {error}", traceback.format_exc()) from error


def _train(
    comm: Simulated, task: Task, config: Config, cluster: Cluster, tell: OnProgress, stack: contextlib.ExitStack
) -> WorkerTrace:
    device = torch.device("cpu")
    feed = DataFeed(task, config, comm.rank, comm.size, stack)
    held, optimizer = build_model(task, config, device, comm)
    persistence = Checkpointer(CheckpointScope(held.local, optimizer, comm.channel("checkpoint")))
    persistence.broadcast_initial_weights()
    share = feed.plan.micro_batch / (cluster.share_samples or feed.plan.global_batch / comm.size)
    pace = ClockPacer(comm, held.model, lambda step: share * cluster.compute.seconds(config.seed, comm.rank, step),
                by_module=not config.compile)  # fmt: skip
    record = _TraceRecorder(comm, feed.plan.global_batch, tell if comm.rank == 0 else lambda message: None)
    context = RunContext(
        task, config, feed, TrainingState(held, optimizer), ProcessGroups.replicated(comm), persistence, record, device
    )
    trainer = build_trainer(context, partial(PacedRunner, pace=pace))
    outcome = trainer.run()
    weights = fingerprint(weights_of(held.local)) if comm.rank == 0 else ""
    return WorkerTrace(record.points, trainer.seconds, pace.busy_seconds, record.bytes, outcome.metrics, weights)
