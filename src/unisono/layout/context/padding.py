"""Padding in a split sequence: attention gets the mask of the whole sequence, and the model sees no padding.

A model that gets the padding mask of its own tokens cannot know the padding of other parts. And if all tokens of a part
are real, its code may take another branch than where some are masked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.errors import InvalidInput
from unisono.tensors.batch import Batch, mapped

MASK_NAME = "attention_mask"  # its name in transformers

Inputs = Callable[[Batch], Any]


def padding_mask(inputs: Any, length: int) -> Tensor | None:
    """The padding mask ``[N, length]`` among a model's arguments, zero at padding; None if there is no such mask."""
    mask = inputs.get(MASK_NAME) if isinstance(inputs, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.shape[1:] == (length,) else None


def hide_padding(batch: Batch, inputs: Inputs, length: int) -> tuple[Batch, Tensor | None]:
    """`batch` with ones in place of its padding mask, and that mask as bool ``[N, length]``, false at padding.

    Without padding: `batch` itself, and None.

    Args:
        inputs: ``inputs(batch)`` returns the model's arguments.

    Raises:
        InvalidInput: the model gets a padding mask that is not a tensor of the batch.
    """
    mask = padding_mask(inputs(batch), length)
    if mask is None or bool(mask.bool().all()):
        return batch, None
    found = _replaced(batch, mask, torch.ones_like(mask))
    left = padding_mask(inputs(found), length)
    if left is not None and not bool(left.bool().all()):
        problem = "with context above 1 a padding mask must be part of the batch, and this one is computed"
        raise InvalidInput(MASK_NAME, tuple(mask.shape), problem, "add a mask [samples, tokens] to the batch")
    return found, mask.bool()


def with_padding(batch: Batch, inputs: Inputs, length: int) -> Batch | None:
    """`batch` with its first sample's last tokens marked as padding.

    None if it has padding already, has no padding mask, or is shorter than 4 tokens.
    """
    mask = padding_mask(inputs(batch), length)
    if mask is None or length < 4 or not bool(mask.bool().all()):
        return None
    short = mask.clone()
    short[0, -(length // 4) :] = 0
    return _replaced(batch, mask, short)


def _replaced(batch: Batch, old: Tensor, new: Tensor) -> Batch:
    return mapped(lambda x: new if x is old else x, batch)
