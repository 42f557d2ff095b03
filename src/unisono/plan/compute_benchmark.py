"""Measures the compute time of one worker's part of a step, on one thread of this machine."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from unisono.comm import SingleWorker
from unisono.comm.process_groups import ProcessGroups
from unisono.config import Config
from unisono.data import Inline
from unisono.elastic.session import StaticSession
from unisono.elastic.training_state import TrainingState
from unisono.observe import NullRecorder
from unisono.tasks.task import Task, with_data
from unisono.trainer.build import build_trainer
from unisono.trainer.build_model import build_model
from unisono.trainer.checkpoint_restorer import CheckpointScope
from unisono.trainer.checkpointing import Checkpointer
from unisono.trainer.context import RunContext
from unisono.trainer.data_feed import DataFeed

_STEPS = 6  # the first step includes initialization and does not count
_ENOUGH_SECONDS = 10.0


def share_seconds(task: Task, config: Config) -> float:
    """Measure the median seconds of forward, backward and optimizer in ``1 / config.workers`` of a step.

    Raises:
        InvalidInput: the task cannot be trained with this configuration.
    """
    task, device, comm = replace(with_data(task), evaluate=None), torch.device("cpu"), SingleWorker()
    with contextlib.ExitStack() as stack, _one_thread():
        whole = DataFeed(task, config, 0, config.workers, stack)
        mine = len(whole.mine)
        config = replace(config, steps=_STEPS, epochs=None, load=Inline(), checkpoint_every=0, evaluate_every=0,
                         global_batch=mine * whole.plan.micro_batch, micro_batch=whole.plan.micro_batch)  # fmt: skip
        feed = DataFeed(task, config, 0, 1, stack)
        held, optimizer = build_model(task, config, device, comm)
        persistence = Checkpointer(CheckpointScope(held.local, optimizer, comm))
        began = time.monotonic()
        session = StaticSession(stop_requested=lambda: time.monotonic() - began > _ENOUGH_SECONDS)
        trainer = build_trainer(
            RunContext(
                task, config, feed, TrainingState(held, optimizer), ProcessGroups.replicated(comm), persistence,
                NullRecorder(), device, session))  # fmt: skip
        trainer.run()
    counted = trainer.step_seconds[1:] or trainer.step_seconds
    return statistics.median(counted) * whole.plan.micro_batches / config.workers / mine


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
