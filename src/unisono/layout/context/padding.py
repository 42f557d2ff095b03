"""Padding of which a worker's part shows only some: attention is told of all of it, and the model of none.

A model that is given a padding mask of its own tokens cannot know where others have padding, and one whose tokens are
all real may take another way than one that has some to hide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.errors import InvalidInput
from unisono.tensors.batch import Batch, mapped

MASK_NAME = "attention_mask"  # as models of transformers call it

Inputs = Callable[[Batch], Any]


def padding_mask(inputs: Any, length: int) -> Tensor | None:
    """The mask ``[N, length]``, nonzero for tokens, among what a model is called with; None where it has none."""
    mask = inputs.get(MASK_NAME) if isinstance(inputs, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.shape[1:] == (length,) else None


def hide_padding(batch: Batch, inputs: Inputs, length: int) -> tuple[Batch, Tensor | None]:
    """`batch` with a mask of ones, and which tokens ``[N, length]`` are real; None where all are.

    Args:
        inputs: what the model is called with, of a batch.

    Raises:
        InvalidInput: the mask is no tensor of the batch.
    """
    mask = padding_mask(inputs(batch), length)
    if mask is None or bool(mask.bool().all()):
        return batch, None
    found = _replaced(batch, mask, torch.ones_like(mask))
    left = padding_mask(inputs(found), length)
    if left is not None and not bool(left.bool().all()):
        problem = "with context above 1 a padding mask has to be part of the batch, and this one is computed"
        raise InvalidInput(MASK_NAME, tuple(mask.shape), problem, "give the batch a mask [samples, tokens]")
    return found, mask.bool()


def with_padding(batch: Batch, inputs: Inputs, length: int) -> Batch | None:
    """`batch` with its first sample's last tokens taken for padding; None where it has some, or cannot be told."""
    mask = padding_mask(inputs(batch), length)
    if mask is None or length < 4 or not bool(mask.bool().all()):
        return None
    short = mask.clone()
    short[0, -(length // 4) :] = 0
    return _replaced(batch, mask, short)


def _replaced(batch: Batch, old: Tensor, new: Tensor) -> Batch:
    return mapped(lambda x: new if x is old else x, batch)
