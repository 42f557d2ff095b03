"""Finds and loads the checkpoint from which a run resumes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from unisono.checkpoint import OpenedCheckpoint, newest, verified
from unisono.config import Config
from unisono.errors import CheckpointDamaged, CheckpointMismatch, InvalidInput
from unisono.observe import Recorder
from unisono.run.directory import CHECKPOINTS
from unisono.run.resolve import check_same_run
from unisono.trainer.checkpoint_restorer import history
from unisono.trainer.checkpointing import Checkpointer

LOG = logging.getLogger("unisono")


def newest_sound(path: Path, record: Recorder) -> OpenedCheckpoint | None:
    """The newest sound checkpoint of the run in `path`, or None. Reports damaged ones."""
    try:
        return newest(path / CHECKPOINTS, partial(_report_damage, record), verified)
    except CheckpointDamaged as error:
        _report_damage(record, error)
        return None


def resumable_checkpoint(
    config: Config, path: Path, meta: Mapping[str, Any], record: Recorder
) -> OpenedCheckpoint | None:
    """The newest sound checkpoint in `path`, from which the run resumes, or None. Reports damaged ones.

    Args:
        meta: the metadata that this attempt of the run writes into its checkpoints.

    Raises:
        InvalidInput: all checkpoints are damaged, or the newest belongs to another run.
    """
    try:
        found = newest(path / CHECKPOINTS, partial(_report_damage, record), verified)
    except CheckpointDamaged as error:
        raise InvalidInput("resume", str(path), str(error), "start a new run with another --run-dir") from error
    if found is None:
        record.event("resume", words="there is no checkpoint yet: starting from the beginning")
        return None
    before = history(found)
    if not before:
        record.event("resume", step=found.step, words="starting from the weights of the checkpoint")
        return found
    check_same_run(config, before["config"])
    reasons = {"samples": "whose order differs", "optimizer": "whose state is another"}
    for name, reason in reasons.items():
        if before[name] != meta[name]:
            raise InvalidInput(
                name, meta[name], f"the run to resume was started with {before[name]}, {reason}",
                "give the same task, or start a new run with another --run-dir")  # fmt: skip
    record.event("resume", step=found.step, words=f"resuming from the checkpoint of step {found.step}")
    return found


def load_checkpoint(checkpointer: Checkpointer, found: OpenedCheckpoint | None, path: Path) -> int:
    """Collective: load the checkpoint that worker 0 `found` in `path`, or broadcast initial weights. Returns its steps.

    Raises:
        InvalidInput: the checkpoint belongs to another model.
    """
    checkpointer.broadcast_initial_weights()
    try:
        return checkpointer.resume(found)
    except CheckpointMismatch as error:
        raise InvalidInput("resume", str(path), f"the checkpoint belongs to another model: {error}", "give the task "
                           "and the arguments that the run was started with, or start a new run with another "
                           "--run-dir") from error  # fmt: skip


def _report_damage(record: Recorder, error: CheckpointDamaged) -> None:
    LOG.warning(error)
    record.event("checkpoint damaged", words=f"damaged checkpoint passed over: {error}")
