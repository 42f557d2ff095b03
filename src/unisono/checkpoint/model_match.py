"""Checks that a checkpoint matches a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, dtype

from unisono.checkpoint.safetensors_format import Spec
from unisono.errors import CheckpointMismatch


def compare(expected: Mapping[str, tuple[dtype, tuple[int, ...]]], found: Mapping[str, Tensor | Spec]) -> None:
    """Check that `found` has the expected names, dtypes and shapes.

    Raises:
        CheckpointMismatch: names the first tensor, in sorted order, that is missing, unexpected or different.
    """
    for name in sorted(expected.keys() | found.keys()):
        mine = Spec(expected[name][0], tuple(expected[name][1])) if name in expected else None
        theirs = Spec(found[name].dtype, tuple(found[name].shape)) if name in found else None
        if mine == theirs:
            continue
        if theirs is None:
            raise CheckpointMismatch(f"tensor {name!r} ({mine}) is not in the checkpoint")
        if mine is None:
            raise CheckpointMismatch(f"the checkpoint has a tensor {name!r} ({theirs}), which this model does not have")
        raise CheckpointMismatch(f"tensor {name!r} is {mine} here and {theirs} in the checkpoint")
