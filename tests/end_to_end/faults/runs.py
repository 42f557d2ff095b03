"""Runs of real processes in which one worker has a fault, and what each worker reported."""

from __future__ import annotations

import logging
import os
import resource
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.faults.planted import loop
from tests.support import processes
from tests.support.training_runs import HERE
from unisono.errors import UnisonoError
from unisono.launch import StopRequest, WorkerContext, WorkerIdentity
from unisono.launch.failure import Failure, first_cause
from unisono.launch.worker_main import failure_fields
from unisono.run.spec import RunSpec
from unisono.run.worker import run_worker
from unisono.system.process import age_seconds
from unisono.tasks.source import NamedTask

PLANTED = "tests/end_to_end/faults/planted.py"


@dataclass(frozen=True)
class Told:
    """What came of a run.

    Args:
        ages_seconds: of the workers' processes when all was done.
        messages: that the launcher would have shown, with the rank of the worker each.
        logs: by rank.
    """

    results: list[dict[str, Any] | None]
    ages_seconds: list[float]
    failures: list[Failure]
    messages: list[tuple[int, Mapping[str, Any]]]
    logs: list[str]

    @property
    def error(self) -> UnisonoError:
        """What the launcher raises."""
        return first_cause(self.failures).error()

    @property
    def notices(self) -> list[str]:
        """What a person sees meanwhile."""
        return [str(message["text"]) for _, message in self.messages if message.get("kind") == "notice"]


def run(fault: str, path: Path, workers: int = 2, file_bytes: Mapping[int, int] | None = None, **settings: Any) -> Told:
    """To its end, without a coordinator.

    Args:
        file_bytes: the largest file that workers of these ranks can write.
    """
    with tempfile.TemporaryDirectory() as meeting:
        told = processes.run(workers, _worker, fault, settings, path, meeting, dict(file_bytes or {}))
    return Told(
        [each["result"] for each in told],
        [each["age_seconds"] for each in told],
        [Failure(rank, **each["failure"]) for rank, each in enumerate(told) if each["failure"]],
        [(rank, message) for rank, each in enumerate(told) for message in each["messages"]],
        [(path / f"worker-{rank}.log").read_text() for rank in range(workers)],
    )


def fail_together(fault: str) -> UnisonoError:
    """What the launcher raises for a loop of the user's own, on two workers that both fail."""
    with tempfile.TemporaryDirectory() as meeting:
        told = processes.run(2, _loop, fault, meeting)
    return first_cause([Failure(rank, **each) for rank, each in enumerate(told)]).error()


def _loop(rank: int, size: int, fault: str, meeting: str) -> dict[str, Any]:
    os.environ.update(WorkerIdentity(rank, size, rank, size, f"file://{meeting}/store", "unisono").environ())
    with pytest.raises(UnisonoError) as raised:
        loop(fault)
    return failure_fields(raised.value)


def _worker(
    rank: int, size: int, fault: str, settings: dict[str, Any], path: Path, meeting: str, file_bytes: dict[int, int]
) -> dict[str, Any]:
    who = WorkerIdentity(rank, size, rank, size, f"file://{meeting}/store", "unisono")
    os.environ.update(who.environ())
    logging.getLogger("unisono").addHandler(logging.FileHandler(path / f"worker-{rank}.log"))
    if rank in file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes[rank], resource.RLIM_INFINITY))
    told: dict[str, Any] = {"result": None, "failure": None, "messages": [], "age_seconds": 0.0}
    order = RunSpec(NamedTask(f"{PLANTED}:task", {"fault": fault}, HERE), {"threads": 1, **settings}, path, time.time())
    try:
        told["result"] = run_worker(WorkerContext(who, told["messages"].append, StopRequest()), order)
        told["age_seconds"] = age_seconds()
    except BaseException as error:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        told["failure"] = failure_fields(error)
    return told
