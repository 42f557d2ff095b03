"""Training runs of virtual workers, with checkpoints on a real disk, whose state tests can change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.bad_steps import AnomalyDetector
from unisono.checkpoint import Writer, fingerprint, newest, verified
from unisono.comm import Simulated, outcomes
from unisono.comm.process_groups import ProcessGroups
from unisono.config import Config
from unisono.elastic.model_state import weights_of
from unisono.elastic.training_state import TrainingState
from unisono.observe import NullRecorder
from unisono.run.resolve import resolve_config
from unisono.tasks.task import Task
from unisono.trainer.build import build_trainer
from unisono.trainer.build_model import build_model
from unisono.trainer.checkpoint_restorer import CheckpointScope
from unisono.trainer.checkpointing import Checkpointer
from unisono.trainer.context import RunContext
from unisono.trainer.data_feed import DataFeed
from unisono.trainer.loop import Trainer

Tamper = Callable[[int, int, Trainer], None]  # given the rank, the steps done and the trainer, between two steps


class Remembering(NullRecorder):
    """A record in memory."""

    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []

    def event(self, event: str, /, **fields: Any) -> None:
        self.events.append({"event": event, **fields})


@dataclass(frozen=True)
class VirtualRun:
    """The result of one worker."""

    weights: str
    optimizer: dict[str, Tensor]
    loss: float
    steps: int
    skipped: tuple[int, ...]
    healed: int
    events: list[Mapping[str, Any]]


def run_virtual(
    workers: int, task: Task, path: Path, tamper: Tamper | None = None, *, resume: bool = False, **settings: Any
) -> list[VirtualRun | BaseException]:
    """The result of each of `workers` virtual workers, by rank."""
    config = resolve_config(task, {"compress": "Exact()", "load": "Inline()", **settings})
    return outcomes(workers, _virtual_worker, task, config, path, tamper, resume)


def run_virtual_alike(
    workers: int, task: Task, path: Path, tamper: Tamper | None = None, **settings: Any
) -> VirtualRun:
    """As `live`, of worker 0, where all workers have the same result."""
    runs = run_virtual(workers, task, path, tamper, **settings)
    for each in runs:
        if isinstance(each, BaseException):
            raise each
    found = [each for each in runs if isinstance(each, VirtualRun)]
    assert len({(run.weights, run.skipped, run.healed) for run in found}) == 1
    return found[0]


def _virtual_worker(
    comm: Simulated, task: Task, config: Config, path: Path, tamper: Tamper | None, resume: bool
) -> VirtualRun:
    with contextlib.ExitStack() as stack:
        feed = DataFeed(task, config, comm.rank, comm.size, stack)
        held, optimizer = build_model(task, config, torch.device("cpu"), comm)
        writer = Writer(
            path / "checkpoints", comm.rank, comm.size, config.keep_checkpoints, lambda event: None, attempt="1"
        )
        stack.callback(writer.close)
        found = partial(newest, path / "checkpoints", lambda error: None, verified)
        meta = {"config": config.mapping()}
        persistence = Checkpointer(
            CheckpointScope(held.local, optimizer, comm.channel("checkpoint"), meta, AnomalyDetector(config.bad_step)),
            writer, config.checkpoint_every, newest=found)  # fmt: skip
        persistence.broadcast_initial_weights()
        first = persistence.resume(found() if resume and comm.rank == 0 else None)
        record = Remembering()
        state = TrainingState(held, optimizer)
        state.set_steps(first)
        context = RunContext(
            task, config, feed, state, ProcessGroups.replicated(comm), persistence, record, torch.device("cpu")
        )
        trainer = build_trainer(context)
        if tamper:
            record.step = lambda done, steps, fields: tamper(comm.rank, done, trainer)  # type: ignore[method-assign]
        outcome = trainer.run()
        tensors, judge = trainer.replica.state, persistence.detector
        return VirtualRun(
            fingerprint(weights_of(held.local)), {n: t.clone() for n, t in tensors.items() if n.startswith("/")},
            outcome.loss, outcome.steps, tuple(sorted(judge.skipped)), judge.healed, record.events)  # fmt: skip
