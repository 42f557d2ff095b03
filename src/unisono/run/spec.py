"""The spec that every worker of a run receives, and the result of a run."""

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
    """The source from which every worker loads the task."""

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> Mapping[str, Any]: ...

    def absolute(self) -> str:
        """A name with the same meaning in every directory."""

    def load(self, others: Collection[str] = ()) -> Task: ...


@dataclass(frozen=True)
class PickledTask:
    """A task that a Python program made, sent to its workers by value."""

    name: str
    pickled: bytes
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, task: Task) -> PickledTask:
        """Pickle `task`."""
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
    """What every worker of a run receives from its launcher.

    Args:
        source: the task.
        settings: fields of `Config` that the user gave.
        path: the run's directory; None if worker 0 has to make it.
        started_at: when the command was started, in seconds since 1970.
        contact: the address of the coordinator of an elastic run; None in other runs.
        holder: the command that holds the lock on the directory, which workers share; None without a lock.
    """

    source: TaskSource
    settings: Mapping[str, Any]
    path: Path | None
    started_at: float
    contact: CoordinatorAddress | None = None
    holder: Holder | None = None


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Args:
        steps: the number of optimizer steps, including those of earlier attempts of a resumed run.
        samples: the number of samples of these steps, including those of dropped steps.
        loss: the loss of the last step.
        metrics: the metrics of the last evaluation.
        weights_sha256: the digest of all parameters and buffers by sorted global name (name, dtype, shape, bytes).
        wall_seconds: the time from the start of the command to the end of training.
        startup_seconds: the time from the start of the command to the first step.
        samples_per_second: the speed of the training steps of this attempt.
        bytes_sent_per_worker: the bytes that a worker sent, the maximum over the workers. Under a layout they include
            what torch's process groups sent over gloo, with headers, and exclude NCCL.
        step_seconds_median: the median time of a step of this attempt.
        peak_rss_bytes: the largest resident memory of a worker.
        run: the run's directory.
        complete: whether all requested steps are done; otherwise the run was asked to stop, and can be resumed.
        ending: `complete` as a sentence for people.
        ledger: seconds by `Phase` of each worker of the last view, by rank; they add up to the time since the start of
            its process.
        skipped_steps: how many of `steps` were dropped as bad.
        healed: how often a replica differed from the majority, and received the state of the majority.
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
            raise CheckpointError(f"{opened.path}: the newest sound checkpoint is of step {opened.step}, but the run "
                                  f"has reached step {self.steps}; unisono.load({self.run!r}) reads it")  # fmt: skip
        return read_weights(opened)


def load(run: str | os.PathLike[str] | Result) -> dict[str, Tensor]:
    """The weights and buffers of the newest sound checkpoint of `run`, for ``model.load_state_dict``.

    They have the names of the model's ``state_dict()`` and are in host memory.

    Args:
        run: a run's directory, a directory of checkpoints, one of them, or a `Result`.

    Raises:
        InvalidInput: there is no checkpoint.
        CheckpointDamaged: all checkpoints are damaged.
    """
    place = run.run if isinstance(run, Result) else run
    return read_weights(open_found(Path(place), "run", LOG.warning))
