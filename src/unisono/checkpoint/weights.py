"""The weights in a checkpoint, by the names that they have in the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from unisono.checkpoint.opened_checkpoint import OpenedCheckpoint

WEIGHTS = "model/"  # before the names of parameters and buffers


def weights_in(opened: OpenedCheckpoint) -> dict[str, str]:
    """The names in ``model.state_dict()``, and those of the same tensors in the checkpoint. Of tensors with several
    names, the first; no buffers that ``state_dict()`` leaves out."""
    left_out = set(_meta(opened).get("transient", ()))
    names = {name.removeprefix(WEIGHTS): name for name in opened.specs if name.startswith(WEIGHTS)}
    return {own: name for own, name in names.items() if own not in left_out}


def read_weights(opened: OpenedCheckpoint) -> dict[str, Tensor]:
    """All of `weights_in`, in host memory, and tensors with several names by each of them.

    Raises:
        CheckpointDamaged: names the file and the tensor that are not what was written.
    """
    found = {own: opened.read(name) for own, name in weights_in(opened).items()}
    return found | {alias: found[name] for alias, name in _meta(opened).get("aliases", {}).items() if name in found}


def _meta(opened: OpenedCheckpoint) -> Mapping[str, Any]:
    return opened.meta if isinstance(opened.meta, Mapping) else {}
