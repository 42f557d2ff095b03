"""What a run is told, and what it comes to, as values."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
from torch import Tensor

from unisono.checkpoint import open_found, read_weights
from unisono.errors import CheckpointError
from unisono.launch.lock import Holder
from unisono.membership import CoordinatorAddress
from unisono.tasks.task import Task

LOG = logging.getLogger("unisono")


class TaskSource(Protocol):
    """Says where a task comes from."""

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> Mapping[str, Any]: ...

    def absolute(self) -> str:
        """A name that means the same in every directory."""

    def load(self, others: Collection[str] = ()) -> Task: ...


@dataclass(frozen=True)
class PickledTask:
    """A task that a Python program made, carried to its workers by value."""

    name: str
    pickled: bytes
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, task: Task) -> PickledTask:
        """`task` as a value that travels."""
        return cls(task.name, cloudpickle.dumps(task))

    def absolute(self) -> str:
        """See `TaskSource`."""
        return self.name

    def load(self, others: Collection[str] = ()) -> Task:
        """See `TaskSource`."""
        task = cloudpickle.loads(self.pickled)  # made by `of` in our own launcher
        assert isinstance(task, Task)
        return task


@dataclass(frozen=True)
class RunSpec:
    """What every worker of a run is told.

    Args:
        source: the task.
        settings: Config fields that were given.
        path: the run's directory; None where worker 0 has to make it.
        began: seconds since 1970 when the command was given.
        contact: of the coordinator, where workers may come and go.
        holder: the command that holds the lock on the directory, which workers share; None where none does.
    """

    source: TaskSource
    settings: Mapping[str, Any]
    path: Path | None
    began: float
    contact: CoordinatorAddress | None = None
    holder: Holder | None = None


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Args:
        steps: optimizer steps in all, earlier lives of a resumed run included.
        samples: of these steps, those of dropped ones included.
        loss: of the last step.
        metrics: of the last evaluation.
        weights_sha256: of every parameter and buffer by sorted global name (name, dtype, shape, bytes).
        wall_seconds: from the command to the end.
        startup_seconds: from the command to the first step.
        samples_per_second: of the training steps of this life.
        bytes_sent_per_worker: the most that one worker sent; under a layout with what torch's groups sent over gloo,
            headers and all, and without what went over NCCL.
        step_seconds_median: of this life.
        peak_rss_bytes: the largest resident memory of a worker.
        run: the run's directory.
        complete: whether all steps that were asked for are done; else the run was asked to stop, and can be resumed.
        ending: the same in words.
        ledger: of each worker that was there at the end, by rank, the seconds of its process's life by what they went
            into; they add up to all of it.
        skipped_steps: of `steps`, those that were dropped as bad.
        healed: how often a replica was found to differ from most, and given their state.
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
    complete: bool
    ending: str
    ledger: Sequence[Mapping[str, float]] = ()
    skipped_steps: int = 0
    healed: int = 0

    def state_dict(self) -> dict[str, Tensor]:
        """The trained weights and buffers, for ``model.load_state_dict``: read from the run's last checkpoint.

        Raises:
            CheckpointError: that checkpoint was not written, or is damaged.
        """
        opened = open_found(Path(self.run), "run", LOG.warning)
        if opened.step != self.steps:
            raise CheckpointError(f"{opened.path}: this is the newest sound checkpoint, and the run has come to step "
                                  f"{self.steps}; unisono.load({self.run!r}) gives what there is")  # fmt: skip
        return read_weights(opened)


def load(run: str | os.PathLike[str] | Result) -> dict[str, Tensor]:
    """The weights and buffers in the newest sound checkpoint of `run`, for ``model.load_state_dict``: by the names in
    the model's own ``state_dict()``, in host memory.

    Args:
        run: a run's directory, a directory of checkpoints, one of them, or a `Result`.

    Raises:
        InvalidInput: there is no checkpoint.
        CheckpointDamaged: there are some, and not one is sound.
    """
    place = run.run if isinstance(run, Result) else run
    return read_weights(open_found(Path(place), "run", LOG.warning))
