"""A run from a task and its settings to a result: what lies where, who starts whom, and what one worker sets up."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import cloudpickle

from unisono.config import Config
from unisono.errors import InvalidInput
from unisono.launch import Identity, StopRequest, Worker, identify, launch, prepare
from unisono.observe import write_summary
from unisono.settings import settle
from unisono.task import Task

PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "unisono.work")
Messages = Callable[[int, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Args:
        steps: optimizer steps in all, earlier lives of a resumed run included.
        samples: that these steps took.
        loss: of the last step.
        metrics: of the last evaluation.
        weights_sha256: of every parameter and buffer by sorted global name (name, dtype, shape, bytes).
        wall_seconds: from the command to the end.
        startup_seconds: from the command to the first step.
        samples_per_second: of the training steps of this life.
        bytes_sent_per_worker: the most that one worker sent.
        step_seconds_median: of this life.
        peak_rss_bytes: the largest resident memory of a worker.
        run: the run's directory.
    """

    steps: int
    samples: int
    loss: float
    metrics: Mapping[str, float]
    weights_sha256: str
    wall_seconds: float
    startup_seconds: float
    samples_per_second: float
    bytes_sent_per_worker: int
    step_seconds_median: float
    peak_rss_bytes: int
    run: str


class TaskSource(Protocol):
    """Says where a task comes from."""

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> Mapping[str, Any]: ...

    def absolute(self) -> str:
        """A name that means the same in every directory."""

    def load(self) -> Task: ...


@dataclass(frozen=True)
class Carried:
    """A task that a Python program made, carried to its workers by value."""

    name: str
    pickled: bytes
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, task: Task) -> Carried:
        """`task` as a value that travels."""
        return cls(task.name, cloudpickle.dumps(task))

    def absolute(self) -> str:
        """See `TaskSource`."""
        return self.name

    def load(self) -> Task:
        """See `TaskSource`."""
        task = cloudpickle.loads(self.pickled)  # made by `of` in our own launcher
        assert isinstance(task, Task)
        return task


@dataclass(frozen=True)
class Order:
    """What every worker of a run is told.

    Args:
        source: the task.
        settings: Config fields that were given.
        path: the run's directory; None where worker 0 has to make it.
        began: seconds since 1970 when the command was given.
    """

    source: TaskSource
    settings: Mapping[str, Any]
    path: Path | None
    began: float


def train(task: Task, config: Config | None = None, *, json: Path | None = None) -> Result | None:
    """Train `task` as `config` says; returns the result when all workers are done.

    Started once per worker by ``unisono launch``, torchrun, Slurm or Open MPI, this process is one of the workers;
    otherwise it starts ``config.workers`` processes of its own. Such a worker other than 0 returns None.

    Raises:
        InvalidInput: what is asked for cannot work.
        WorkerFailed: a worker ended badly; carries its traceback.
        Diverged: the loss is not finite.
    """
    given = config or Config()
    settings = {f: v for f, v in given.mapping().items() if v != Config().mapping().get(f)}
    return start(Carried.of(task), settings, json=json, on_message=lambda rank, message: None)


def start(
    source: TaskSource, settings: Mapping[str, Any], *, json: Path | None, on_message: Messages
) -> Result | None:
    """Run the task of `source` under `settings` (Config fields that the user gave).

    Returns the result; None in a worker other than 0 that another launcher started.

    Args:
        json: where to write the result as JSON besides ``summary.json``.
        on_message: told of progress, notices and where the run lies, with the rank of the worker that says so.
    """
    began = time.time() - process_age_seconds()
    identity = identify(os.environ)
    if identity.launcher != "none":
        return _be_worker(identity, source, settings, began, json, on_message)
    with prepare(PRELOAD) as server:  # imports torch while this process checks what was written
        settings = with_earlier(settings)
        config = settle(source.load(), settings)
        with claimed(config, source.name) as path:
            on_message(0, {"kind": "run", "path": str(path)})
            order = Order(source, settings, path, began)
            results = launch(
                "unisono.work:work",
                (order,),
                config.workers,
                logs=path / "logs",
                prepared=server,
                on_message=on_message,
            )
    return conclude(results[0], path, json)


def _be_worker(
    identity: Identity,
    source: TaskSource,
    settings: Mapping[str, Any],
    began: float,
    json: Path | None,
    on_message: Messages,
) -> Result | None:
    """This process is one of several that somebody else's launcher started."""
    from unisono.work import work  # imports torch

    said = settings.get("workers")
    if said is not None and int(said) != identity.size:
        raise InvalidInput(
            "workers", said, f"{identity.launcher} started {identity.size}", "leave it out, or start as many"
        )
    settings = with_earlier(settings)
    path = Path(settings["run"]).absolute() if settings.get("run") else None
    worker = Worker(identity, lambda message: on_message(identity.rank, message), StopRequest.listen())
    result = work(worker, Order(source, {**settings, "workers": identity.size}, path, began))
    return conclude(result, Path(result["run"]), json) if identity.rank == 0 else None


def with_earlier(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Under what is given for a run that is resumed, what its earlier life was given.

    Raises:
        InvalidInput: the run's ``config.toml`` cannot be read.
    """
    if str(settings.get("resume", False)).lower() != "true" or not settings.get("run"):
        return settings
    file = Path(settings["run"]) / "config.toml"
    if not file.exists():
        return settings
    try:
        earlier = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput("resume", str(file), f"cannot be read ({error})", "mend it, or take it away") from None
    earlier.pop("task", None)
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if settings.get(one) is not None:
            earlier.pop(other, None)
    return {**earlier, **{name: value for name, value in settings.items() if value is not None}}


def conclude(result: Mapping[str, Any], path: Path, json: Path | None) -> Result:
    """Write what worker 0 returned to the run's directory and to `json`."""
    for file in (path / "summary.json", json):
        if file is not None:
            write_summary(file, result)
    return Result(**result)


@contextlib.contextmanager
def claimed(config: Config, name: str) -> Iterator[Path]:
    """The run's directory, made if it is new. Invalid input inside takes a new directory away again.

    Raises:
        InvalidInput: the directory is there and nobody said resume, or is not there and somebody did.
    """
    path = Path(config.run).absolute() if config.run else _fresh(name)
    new = not path.exists()
    if config.resume and not config.run:
        raise InvalidInput("resume", True, "which run is not said", "add --run DIR")
    if config.resume and new:
        raise InvalidInput("run", str(path), "there is no such run to resume", "leave out --resume to start it")
    if not new and not config.resume and any(path.iterdir()):
        raise InvalidInput("run", str(path), "the directory exists", "add --resume to go on with it, or name another")
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "logs").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise InvalidInput("run", str(path), f"cannot be made ({error.strerror})", "name another directory") from None
    try:
        yield path
    except InvalidInput:
        if new:
            shutil.rmtree(path, ignore_errors=True)
        raise


def _fresh(name: str) -> Path:
    stem = "".join(c if c.isalnum() or c in "-_." else "-" for c in name.rsplit("/", 1)[-1])
    base = Path("runs").absolute() / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    path, n = base, 2
    while path.exists():
        path, n = base.with_name(f"{base.name}-{n}"), n + 1
    return path


def process_age_seconds() -> float:
    """How long ago this process was started; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))
    return 0.0
