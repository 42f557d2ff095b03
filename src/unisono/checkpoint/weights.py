"""Reads the weights in a checkpoint, by their names in the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from unisono.checkpoint.opened_checkpoint import OpenedCheckpoint

WEIGHTS = "model/"  # prefix of the names of parameters and buffers in a checkpoint


def weights_in(opened: OpenedCheckpoint) -> dict[str, str]:
    """Names in ``model.state_dict()``, mapped to the names of the same tensors in the checkpoint.

    A tensor with several names is listed under the first. Non-persistent buffers are left out.
    """
    left_out = set(_meta(opened).get("transient", ()))
    names = {name.removeprefix(WEIGHTS): name for name in opened.specs if name.startswith(WEIGHTS)}
    return {own: name for own, name in names.items() if own not in left_out}


def read_weights(opened: OpenedCheckpoint) -> dict[str, Tensor]:
    """The tensors of `weights_in` in host memory; a tensor with several names is listed under each of them.

    Raises:
        CheckpointDamaged: names the file and the tensor.
    """
    found = {own: opened.read(name) for own, name in weights_in(opened).items()}
    return found | {alias: found[name] for alias, name in _meta(opened).get("aliases", {}).items() if name in found}


def _meta(opened: OpenedCheckpoint) -> Mapping[str, Any]:
    return opened.meta if isinstance(opened.meta, Mapping) else {}
