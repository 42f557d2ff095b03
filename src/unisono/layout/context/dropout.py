"""Dropout of a worker's part of activations, with the mask that one worker would draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.layout.context.sequence_split import SequenceSplit


def dropout(
    split: SequenceSplit,
    rank: int,
    original: Callable[..., Tensor],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Dropout with the mask that one worker would draw for the whole sequence.

    Activations ``[N, local, ...]`` with features are multiplied by the local tokens' part of that mask, which all ranks
    draw from equal random states. Any other input goes to `original`, ``torch.nn.functional.dropout``.
    """
    if not training or p == 0 or input.dim() < 3 or input.shape[1] != split.local:
        return original(input, p, training, inplace)
    ones: Any = torch.ones(input.shape[0], split.length, *input.shape[2:], dtype=input.dtype, device=input.device)
    mask = split.part(original(ones, p), 1, rank)
    return input.mul_(mask) if inplace else input * mask
