"""What workers of a layout would refuse once they are there, refused by a process that nobody waits for."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from unisono.assemble import Feed
from unisono.launch import Worker
from unisono.layout.possible import check as check_model
from unisono.order import TaskSource
from unisono.settings import settle


def check(worker: Worker, source: TaskSource, settings: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` where the task of `source` cannot be trained under the layout of `settings`: what a worker
    is asked, before there are those that train."""
    task = source.load()
    config = settle(task, settings)
    with contextlib.ExitStack() as stack:
        feed = Feed(task, config, 0, config.workers, stack)
        check_model(task.model, feed.places, feed.sample())
