"""Checkpoints read back. Nothing is handed out before every byte of it was verified."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from unisono.checkpoint import directory as place
from unisono.checkpoint.opened_checkpoint import OpenedCheckpoint, open_checkpoint
from unisono.errors import CheckpointDamaged

Read = TypeVar("Read")


def newest(
    directory: str | os.PathLike[str],
    on_damaged: Callable[[CheckpointDamaged], None],
    read: Callable[[Path], Read],
) -> Read | None:
    """What `read` makes of the newest checkpoint that it does not find damaged; None where there is none at all. What
    is damaged is told and passed over.

    Raises:
        CheckpointDamaged: there are checkpoints, but not one is sound.
    """
    found = dict(place.checkpoints(directory))
    latest: int | None = None
    try:
        latest = place.read_latest(Path(directory))
    except CheckpointDamaged as damage:
        on_damaged(damage)
    for step in place.newest_first(list(found), latest):
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
    """The newest checkpoint that can be opened, to be read piece by piece; see `newest` and `open_checkpoint`."""
    return newest(directory, on_damaged, open_checkpoint)
