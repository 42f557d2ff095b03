"""Processes of a test that call `unisono.horovod` as workers of one run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import unisono.horovod as hvd
from tests.support import processes
from unisono.launch import WorkerIdentity


def over(size: int, directory: Path, law: Callable[..., Any], *args: Any, communicator: str = "auto") -> list[Any]:
    """What `law` returned on each of `size` workers, in processes."""
    return processes.run(size, initialized, f"file://{directory}", communicator, law, *args)


def initialized(rank: int, size: int, url: str, communicator: str, law: Callable[..., Any], *args: Any) -> Any:
    """``law(*args)`` in a process, between `init` and `shutdown`."""
    become_worker(rank, size, url)
    hvd.init(communicator=communicator, timeout_seconds=30)
    try:
        return law(*args)
    finally:
        hvd.shutdown()


def become_worker(rank: int, size: int, url: str) -> None:
    """Set the environment of a worker."""
    os.environ.update(WorkerIdentity(rank, size, rank, size, url).environ())


class Warnings(logging.Handler):
    """Collects warnings, and lets the other worker continue after the first."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if len(self.texts) == 1:
            hvd.allreduce_async(torch.ones(1), name="warned")
