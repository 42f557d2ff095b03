"""Finds checkpoints in a run's directory or a directory of checkpoints, or at the path of a single checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from unisono.checkpoint.directory import MANIFEST, checkpoints, step_of
from unisono.checkpoint.load import open_newest
from unisono.checkpoint.opened_checkpoint import OpenedCheckpoint, open_checkpoint
from unisono.errors import CheckpointDamaged, InvalidInput


def checkpoints_directory(directory: Path) -> Path:
    """The directory of checkpoints in a run's `directory`; for any other directory, `directory` itself."""
    return directory / "checkpoints" if (directory / "checkpoints").is_dir() else directory


def find_checkpoints(directory: Path, field: str) -> list[Path]:
    """All checkpoints in `directory`, oldest first; only `directory` if it is itself a checkpoint.

    Args:
        field: what the error calls the directory.

    Raises:
        InvalidInput: there is no checkpoint.
    """
    if (directory / MANIFEST).exists() or (directory.is_dir() and step_of(directory.name) is not None):
        return [directory]
    paths = [path for _, path in checkpoints(checkpoints_directory(directory))]
    if not paths:
        raise InvalidInput(
            field, str(directory), "there is no checkpoint", "name the directory of a run, of its checkpoints or of one"
        )
    return paths


def open_found(directory: Path, field: str, on_damaged: Callable[[CheckpointDamaged], None]) -> OpenedCheckpoint:
    """The newest sound checkpoint of `find_checkpoints`.

    Raises:
        InvalidInput: as `find_checkpoints`.
        CheckpointDamaged: all checkpoints are damaged.
    """
    if find_checkpoints(directory, field) == [directory]:
        return open_checkpoint(directory)
    opened = open_newest(checkpoints_directory(directory), on_damaged)
    assert opened is not None  # `find_checkpoints` found one
    return opened
