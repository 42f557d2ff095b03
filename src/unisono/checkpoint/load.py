"""Finds the newest checkpoint that is not damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from unisono.checkpoint import directory as layout
from unisono.checkpoint.opened_checkpoint import OpenedCheckpoint, open_checkpoint
from unisono.errors import CheckpointDamaged

Read = TypeVar("Read")


def newest(
    directory: str | os.PathLike[str],
    on_damaged: Callable[[CheckpointDamaged], None],
    read: Callable[[Path], Read],
) -> Read | None:
    """The result of `read` for the newest checkpoint that is not damaged; None without any checkpoint.

    Args:
        on_damaged: called with the error of each damaged checkpoint, which is skipped.
        read: ``read(path)`` raises `CheckpointDamaged` if the checkpoint at `path` is damaged.

    Raises:
        CheckpointDamaged: there are checkpoints, and all are damaged.
    """
    found = dict(layout.checkpoints(directory))
    latest: int | None = None
    try:
        latest = layout.read_latest(Path(directory))
    except CheckpointDamaged as damage:
        on_damaged(damage)
    for step in layout.newest_first(list(found), latest):
        try:
            return read(found[step])
        except CheckpointDamaged as damage:
            on_damaged(damage)
    if found:
        raise CheckpointDamaged(f"{directory}: not one of its {len(found)} checkpoints is sound")
    return None


def open_newest(
    directory: str | os.PathLike[str], on_damaged: Callable[[CheckpointDamaged], None]
) -> OpenedCheckpoint | None:
    """The newest checkpoint that `open_checkpoint` accepts; see `newest`."""
    return newest(directory, on_damaged, open_checkpoint)
