"""Checks a layout in a separate process before any worker starts, with the errors that workers would raise."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from unisono.config import FIELDS, Config
from unisono.launch import WorkerContext
from unisono.layout import BlockOptions, RankMesh, Sample
from unisono.layout.feasibility import check as check_model
from unisono.run.resolve import resolve_config
from unisono.run.spec import TaskSource
from unisono.tasks.task import Task
from unisono.trainer.build_model import create_model
from unisono.trainer.data_feed import DataFeed
from unisono.trainer.device import choose_device
from unisono.trainer.optimizer_coupling import needs_wholes


def check(worker: WorkerContext, source: TaskSource, settings: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` if the task of `source` cannot be trained under the layout of `settings`. Runs in a process
    of its own."""
    task = source.load(FIELDS)
    config = resolve_config(task, settings)
    with contextlib.ExitStack() as stack:
        feed = DataFeed(task, config, 0, config.workers, stack)
        check_task(task, config, feed.mesh, feed.sample())


def check_task(task: Task, config: Config, places: RankMesh, sample: Sample) -> bool:
    """Raise `InvalidInput` if the model or the optimizer of `task` does not allow the layout of `config`. Returns
    whether sharded tensors must be stepped whole (see `needs_wholes`)."""
    compute = BlockOptions(config.precision, config.activation_checkpointing, config.compile)
    model = check_model(partial(create_model, task), places, sample, compute)
    dims = {p.dim() for p in model.parameters() if p.requires_grad}
    return needs_wholes(task.optimizer, dims, config.layout, choose_device(config.device, 0))
