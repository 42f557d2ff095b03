"""Loads a whole checkpoint as a resumed run does: verified first, then tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from unisono.checkpoint import newest, verified
from unisono.errors import CheckpointDamaged


@dataclass(frozen=True)
class Loaded:
    """A sound checkpoint: its step, tensors by name, meta and directory."""

    step: int
    tensors: Mapping[str, Tensor]
    meta: Any
    path: Path


def load(path: str | os.PathLike[str]) -> Loaded:
    """All of the checkpoint in directory `path`. Raises `CheckpointDamaged`."""
    opened = verified(Path(path))
    return Loaded(opened.step, {name: opened.read(name) for name in opened.specs}, opened.meta, opened.path)


def load_newest(directory: str | os.PathLike[str], on_damaged: Callable[[CheckpointDamaged], None]) -> Loaded | None:
    """The newest sound checkpoint; see `newest`."""
    return newest(directory, on_damaged, load)


def flip(path: Path, position: int, mask: int = 0x10) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ mask]))
