"""What a run will be like: the trainer and the synchronizer themselves, on virtual workers and a made-up clock.

The weights, losses and bytes are real: the same that processes would compute and send. The time is made up: of
`Compute` while a worker computes, of `unisono.comm.link_model` while messages travel. What compressing costs the
processor is not in it, nor the loading of data, nor evaluation.
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
from unisono.trainer.checkpointing import Checkpointer
from unisono.trainer.context import RunContext
from unisono.trainer.data_feed import DataFeed

_PATIENCE_SECONDS = 1e9  # of virtual time: nobody is taken for lost because a link is slow
OnProgress = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Cluster:
    """What trains: the workers' links, one for all or one each, and how long they compute.

    Args:
        share_samples: that a share in `compute` has; None: ``global_batch / workers`` of whatever is forecast.
    """

    links: tuple[Link, ...]
    compute: Compute
    share_samples: float | None = None

    def link(self, workers: int) -> Sequence[Link]:
        """One for each of `workers`."""
        return self.links * workers if len(self.links) == 1 else self.links


@dataclass(frozen=True)
class Point:
    """After `step` steps: seconds since the first began, the most bytes that a worker has sent, the training loss
    (where workers know only their own, the mean of these)."""

    step: int
    seconds: float
    bytes: int
    loss: float


@dataclass(frozen=True)
class Forecast:
    """What a run will be like.

    Args:
        seconds: for all steps.
        step_seconds_median, step_seconds_low, step_seconds_high: from the end of one step, by its last worker, to that
            of the next; between low and high lie eight of ten.
        waiting: share of the workers' time in which they do not compute: they wait for a link, or for each other.
        bytes_per_worker: that the worker who sends most sends in all.
        loss: of the last step.
        metrics: of the evaluation at the end.
        weights_sha256: as of `Result`.
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
        """Over the whole run."""
        return self.steps / self.seconds if self.seconds else math.inf


def forecast(task: Task, config: Config, cluster: Cluster, tell: OnProgress = lambda message: None) -> Forecast:
    """Train `task` as `config` says on virtual workers; processes, disks and devices in `config` mean nothing here.

    Args:
        tell: hears of progress, as `unisono.observe.display.Display` does.

    Raises:
        InvalidInput: what is asked for cannot work.
        Diverged: the loss is not finite.
        WorkerFailed: an exception in the user's code.
    """
    task, config = with_data(task), replace(config, load=Inline(), checkpoint_every=0, device="cpu")
    with contextlib.ExitStack() as stack:
        DataFeed(task, config, 0, config.workers, stack)  # what is wrong with the plan is said before threads start
    lives = simulate(
        config.workers, _run_worker, task, config, cluster, tell, link=cluster.link(config.workers),
        seed=config.seed, timeout_seconds=_PATIENCE_SECONDS)  # fmt: skip
    return summarize(lives)


@dataclass(frozen=True)
class WorkerTrace:
    """What one virtual worker has seen: its points, with its own bytes and losses, and what it did in all."""

    points: Sequence[Point]
    seconds: float
    busy_seconds: float
    bytes: int
    metrics: Mapping[str, float]
    weights_sha256: str


def summarize(lives: Sequence[WorkerTrace]) -> Forecast:
    """What all workers have seen, together."""
    points = _points([point for life in lives for point in life.points])
    ends = [0.0, *(point.seconds for point in points)]
    low, median, high = quantiles([after - before for before, after in pairwise(ends)], 0.1, 0.5, 0.9)
    seconds = max(life.seconds for life in lives)
    passed = sum(life.seconds for life in lives)
    return Forecast(
        steps=points[-1].step,
        seconds=seconds,
        step_seconds_median=median,
        step_seconds_low=low,
        step_seconds_high=high,
        waiting=max(0.0, 1 - sum(life.busy_seconds for life in lives) / passed) if passed else 0.0,
        bytes_per_worker=max(life.bytes for life in lives),
        loss=points[-1].loss,
        metrics=lives[0].metrics,
        weights_sha256=lives[0].weights_sha256,
        points=tuple(points),
    )


def _points(seen: Sequence[Point]) -> list[Point]:
    """One point a step; a step is over when its last worker is done with it, and with all before it."""
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
        """Sent since it was opened."""
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
    """What one virtual worker does."""
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
    persistence = Checkpointer(None, held.local, optimizer, comm.channel("checkpoint"), 0, {})
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
