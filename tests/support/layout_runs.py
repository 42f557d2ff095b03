"""One run of a task on some workers: the losses of all its steps, or why it was refused."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import corner_models, layout_models, processes
from unisono.errors import InvalidInput, UnisonoError
from unisono.launch import StopRequest, WorkerContext, WorkerIdentity
from unisono.observe import progress_reporter
from unisono.run.spec import RunSpec
from unisono.run.worker import run_worker
from unisono.tasks.source import NamedTask

ROOT = str(Path(__file__).resolve().parents[2])
# Once, where workers are forked from, and not in each of them.
processes.PRELOAD += [
    "transformers.models.llama.modeling_llama",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bart.modeling_bart",
]


class Refused(Exception):
    """The run was refused; the message says why."""


@dataclass(frozen=True)
class Run:
    """The result of a run.

    Args:
        losses: by step, from 1.
        weights: their hash.
        log: worker 0's log.
    """

    losses: Mapping[int, float]
    weights: str
    log: str


def run(task: str, arguments: Mapping[str, Any], workers: int, path: Path, **settings: Any) -> Run:
    """Train task `task` of `tests.support.layout_models` or `tests.support.corner_models`.

    Raises:
        Refused: with the message of the workers, or of one of them.
    """
    path.mkdir(parents=True, exist_ok=True)
    home = layout_models if hasattr(layout_models, task) else corner_models
    source = NamedTask(f"{home.__name__}:{task}", arguments, ROOT)
    given = {"threads": 1, "workers": workers, **settings}
    with tempfile.TemporaryDirectory() as rendezvous:
        answers = processes.run(workers, _work, source, given, path, rendezvous, timeout_seconds=300)
    refusals = [answer for answer in answers if isinstance(answer, InvalidInput)]
    if refusals:
        raise Refused(str(refusals[0]))
    for answer in answers:
        if isinstance(answer, UnisonoError):
            raise answer
    first: Run = answers[0]
    return first


def _work(rank: int, size: int, task: NamedTask, settings: dict[str, Any], path: Path, rendezvous: str) -> Any:
    progress_reporter.REPORT_SECONDS = 0.0  # every step is reported
    messages: list[Mapping[str, Any]] = []
    log = _Lines()
    logging.getLogger("unisono").addHandler(log)
    who = WorkerIdentity(rank, size, rank, size, f"file://{rendezvous}/store", "unisono")
    try:
        result = run_worker(
            WorkerContext(who, messages.append, StopRequest()), RunSpec(task, settings, path, time.time())
        )
    except UnisonoError as error:  # a refusal, or the loss of a worker that was refused
        return error
    losses = {message["step"]: message["loss"] for message in messages if message["kind"] == "progress"}
    return Run(losses, result["weights_sha256"], "\n".join(log.lines))


class _Lines(logging.Handler):
    """Collects log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.lines.append(record.getMessage())
