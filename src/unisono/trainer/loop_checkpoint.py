"""Saves and loads the state of a custom loop, in the format of a run's checkpoints."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint import Event, OpenedCheckpoint, Writer, checkpoints_directory, newest, verified
from unisono.checkpoint.directory import step_name
from unisono.comm import Communicator
from unisono.comm.text import broadcast_text, gather_text
from unisono.compress import Exact
from unisono.config import IDENTITY, Config, first_difference
from unisono.data import MicroBatchPlan
from unisono.elastic.agreement import broadcast_tensors
from unisono.elastic.extra_state import ExtraState
from unisono.elastic.loop_group import LoopGroup
from unisono.elastic.state_transfer import Progress
from unisono.elastic.training_state import TrainingState
from unisono.errors import CheckpointError, CheckpointMismatch, InvalidInput
from unisono.trainer.checkpoint_restorer import CheckpointScope, history
from unisono.trainer.checkpointing import EXTRA, Checkpointer
from unisono.trainer.loop_model import LoopOptions
from unisono.trainer.loop_models import LoopModels

LOG = logging.getLogger("unisono")
MARKER = ".{}.seen"  # a file that shows whether workers see the same directory


@dataclass(frozen=True)
class Plan:
    """What determines the steps of a loop.

    Args:
        config: its fields that apply to a loop.
        samples: in the dataset; None if the user's code loads the data.
    """

    config: Config
    samples: int | None = None


@dataclass(frozen=True)
class Recalled:
    """What a checkpoint contains beside the state itself.

    Args:
        meta: of its manifest.
        residuals: of this worker's compressor, by parameter.
    """

    meta: Mapping[str, Any] = field(default_factory=dict)
    residuals: Mapping[str, Tensor] = field(default_factory=dict)

    def check(self, plan: Plan) -> None:
        """Raise `InvalidInput` if the checkpoint was saved under another plan than `plan`."""
        if not self.meta:
            return
        now, before = plan.config.mapping(), self.meta["config"]
        exact = isinstance(plan.config.compress, Exact)  # there the number of threads can change bits
        if name := first_difference(now, before, (*IDENTITY, "threads") if exact else IDENTITY):
            raise _mismatch(name, now.get(name), before.get(name))
        if plan.samples != self.meta["samples"]:
            raise _mismatch("data", plan.samples, self.meta["samples"])


class LoopCheckpoints:
    """Checkpoints of one custom loop.

    Args:
        options: how the loop takes its steps.
    """

    def __init__(self, group: LoopGroup, state: TrainingState, options: LoopOptions) -> None:
        self._group, self._state, self._options = group, state, options
        self._plan: MicroBatchPlan | None = None
        self._recalled = Recalled()

    def set_plan(self, plan: MicroBatchPlan) -> None:
        """The loop takes its steps by `plan`. Raises `InvalidInput` if what was loaded was saved under another one."""
        self._plan = plan
        self._recalled.check(self._described())

    def load(self, directory: Path) -> int:
        """See `World.load`."""
        if not self._group.late:
            self._recalled = load(self._group.metrics, directory, self._state, self._described())
        return self._state.progress.steps

    def save(self, directory: Path, keep: int, models: LoopModels | None) -> Path | None:
        """See `World.save`."""
        return save(self._group.metrics, directory, keep, self._state, self._described(), models)

    def take_residuals(self) -> Mapping[str, Tensor]:
        """The residuals that were loaded, once; empty if other workers wrote them."""
        recalled, self._recalled = self._recalled, Recalled()
        same = bool(recalled.residuals) and recalled.meta["config"]["workers"] == self._group.size
        return recalled.residuals if same else {}

    def _described(self) -> Plan:
        plan = self._plan
        options = self._options
        given: dict[str, Any] = {
            "workers": self._group.size, "threads": torch.get_num_threads(), "sync": options.sync,
            "compress": options.compress, "clip": options.clip, "overlap": options.overlap,
        }  # fmt: skip
        if plan is not None:
            given |= {"global_batch": plan.global_batch, "micro_batch": plan.micro_batch, "seed": plan.seed}
        return Plan(Config(**given), plan.samples if plan is not None else None)


def save(
    comm: Communicator, directory: Path, keep: int, state: TrainingState, plan: Plan, models: LoopModels | None
) -> Path | None:
    """Collective, between two steps: save `state`. Returns the checkpoint's directory once it is on disk.

    If it cannot be written, logs a warning and returns None.

    Raises:
        CheckpointError: `directory` cannot be used.
        PeerLost: a worker was lost, and nothing was written.
    """
    done, attempt = state.progress.steps, broadcast_text(comm, secrets.token_hex(8))
    path, writers = same_directory(comm, str(checkpoints_directory(directory.absolute())), attempt)
    meta = {
        "config": plan.config.mapping(),
        "samples": plan.samples,
        "optimizer": type(state.optimizer).__name__,
    }
    extra = broadcast_tensors(comm, _extra(state).state_dict())
    with _writing(comm, path, writers, keep, attempt) as writer:
        checkpointer = Checkpointer(CheckpointScope(state.model, state.optimizer, comm, meta), writer, extra=extra)
        if models is not None:
            checkpointer.bind(models)
        checkpointer.finish(done)
    return path / step_name(done) if checkpointer.committed == done else None


def load(comm: Communicator, directory: Path, state: TrainingState, plan: Plan) -> Recalled:
    """Collective, before the first step: load the newest intact checkpoint in `directory`, if any, on all workers.

    Raises:
        InvalidInput: the checkpoint is of another model, optimizer or compressor, or holds other registered states.
        CheckpointDamaged: there are checkpoints, and none is intact.
    """
    opened = newest(checkpoints_directory(directory.absolute()), LOG.warning, verified) if comm.rank == 0 else None
    if comm.rank == 0 and opened is None:
        LOG.info("there is no checkpoint in %s yet: starting from the beginning", directory)
    checkpointer = Checkpointer(CheckpointScope(state.model, state.optimizer, comm, {"config": plan.config.mapping()}))
    meta = json.loads(broadcast_text(comm, json.dumps(_meta_of(opened))))
    _check(meta, state, plan)
    try:
        steps = checkpointer.resume(opened)
    except CheckpointMismatch as error:
        raise InvalidInput("model", type(state.model).__name__, f"the checkpoint is of another one: {error}",
                           "build the model that was saved") from error  # fmt: skip
    extra = broadcast_tensors(comm, _extra_tensors(opened))
    if extra:
        cure = "register the same by world.register_state, before world.load"
        _extra(state).load_state_dict(extra, "the checkpoint has", cure)
    state.progress = Progress(steps, shared=checkpointer.restored.shared)
    return Recalled(meta, checkpointer.restored.residuals)


def same_directory(comm: Communicator, path: str, mark: str) -> tuple[Path, tuple[int, ...]]:
    """Collective: the directory at `path` on worker 0, and the ranks that see the same directory, in order.

    Other workers may be on hosts without it.

    Args:
        mark: a unique name of letters and digits.
    """
    with contextlib.suppress(OSError):  # then worker 0 writes alone, or raises the problem later
        if comm.rank == 0:
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
            Path(path, MARKER.format(mark)).touch(mode=0o600)
    directory = Path(broadcast_text(comm, path))
    seen = comm.gather(torch.tensor([(directory / MARKER.format(mark)).exists() or comm.rank == 0])).wait()
    with contextlib.suppress(OSError):
        if comm.rank == 0:
            (directory / MARKER.format(mark)).unlink()
    return directory, tuple(rank for rank, sees in enumerate(seen.view(-1).tolist()) if sees)


@contextlib.contextmanager
def _writing(
    comm: Communicator, path: Path, writers: Sequence[int], keep: int, attempt: str
) -> Iterator[Writer | None]:  # fmt: skip
    """Collective: a writer on each of the ranks `writers`, None on others.

    All ranks raise the same error, and none writes before worker 0 has removed what earlier attempts left.
    """
    writer, problem = None, ""
    if comm.rank in writers:
        try:
            writer = Writer(path, writers.index(comm.rank), len(writers), keep, _log, attempt)
        except CheckpointError as error:
            problem = str(error)
    try:
        problems = [text for text in gather_text(comm, problem) if text]
        if problems:
            raise CheckpointError(problems[0])
        yield writer
    finally:
        if writer is not None:
            writer.close()


def _log(event: Event) -> None:
    (LOG.warning if event.kind == "failed" else LOG.info)(event.words)


def _meta_of(opened: OpenedCheckpoint | None) -> Mapping[str, Any]:
    return history(opened) if opened is not None else {}


def _extra_tensors(opened: OpenedCheckpoint | None) -> dict[str, Tensor]:
    if opened is None:
        return {}
    return {name.removeprefix(EXTRA): opened.read(name) for name in opened.specs if name.startswith(EXTRA)}


def _extra(state: TrainingState) -> ExtraState:
    assert state.extra is not None
    return state.extra


def _check(meta: Mapping[str, Any], state: TrainingState, plan: Plan) -> None:
    """Raise `InvalidInput` if the state cannot continue from a checkpoint with this `meta`."""
    if not meta:
        return
    name, compress = type(state.optimizer).__name__, plan.config.mapping()["compress"]
    if name != meta["optimizer"]:
        raise _mismatch("optimizer", name, meta["optimizer"])
    if compress != meta["config"]["compress"]:
        raise _mismatch("compress", compress, meta["config"]["compress"])


def _mismatch(name: str, now: Any, before: Any) -> InvalidInput:
    return InvalidInput(name, now, f"the checkpoint was saved with {before}", "give what it was saved with, or start "
                        "without world.load")  # fmt: skip
