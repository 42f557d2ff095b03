"""One worker's part of a micro-batch, and its weight in the loss.

The contract for the caller that computes a step:

1. Every rank of the context group has the same whole micro-batch and takes its part: ``take_part(batch, split, rank)``.
2. Every rank runs the model and the task's own loss on its part: the mean over its own counted tokens.
3. Every rank multiplies its loss by ``loss_share(weight, batch, split, rank)`` (and by the micro-batch's own weight)
   before backward. The shares of a group sum to 1, so losses **and gradients sum to** those of the whole micro-batch:
   sum them over the group, never average.

Where targets are masked (``ignore_index``) the parts of a micro-batch have different numbers of counted tokens, and a
mean of means is not the mean: the task's `weight` must then be the number of counted tokens. Where all tokens count, a
weight that is a number of samples is enough: each part has the same number, and every share is ``1 / size``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.errors import InvalidInput
from unisono.layout.context.sequence_split import SequenceSplit
from unisono.tensors.batch import Batch, mapped, tensors


def sequence_length(batch: Batch, dim: int = 1) -> int:
    """Tokens of a sequence: the size along `dim` of the batch's first tensor that has this dimension.

    Raises:
        InvalidInput: no tensor has this dimension.
    """
    for tensor in tensors(batch):
        if tensor.dim() > dim:
            return tensor.shape[dim]
    raise InvalidInput("context", "a batch", f"no tensor in it has dimension {dim}, along which sequences are split",
                       "use context=1 for data without sequences")  # fmt: skip


def take_part(batch: Batch, split: SequenceSplit, rank: int, dim: int = 1) -> Batch:
    """The part of `batch` of worker `rank`, in the same nesting of tuples, lists and mappings.

    A tensor whose size along `dim` is the sequence's length is cut to the worker's tokens. A mask ``[N, heads or 1,
    length, length]`` is cut to the rows of these tokens, with all columns. Everything else stays whole.
    """

    def cut(x: Tensor) -> Tensor:
        if x.dim() > dim and x.shape[dim] == split.length:
            return split.part(x, dim, rank)
        if x.dim() == 4 and x.shape[-2:] == (split.length, split.length):
            return split.part(x, -2, rank)
        return x

    return mapped(cut, batch)


def loss_share(
    weight: Callable[[Batch], float] | None, batch: Batch, split: SequenceSplit, rank: int, dim: int = 1
) -> float:
    """The weight of worker `rank`'s loss in the loss of the micro-batch, from 0 to 1; the group's weights sum to 1.

    Args:
        weight: ``weight(batch)`` is the task's weight: a number of counted tokens, or of samples. None: every token
            counts the same.
        batch: the whole micro-batch.
    """
    if weight is None:
        return 1 / split.size
    weights = [float(weight(take_part(batch, split, r, dim))) for r in range(split.size)]
    total = sum(weights)
    return weights[rank] / total if total else 1 / split.size


def part_loss(loss: Callable[[Any, Batch], Tensor], output: Any, batch: Batch, share: float) -> Tensor:
    """`loss` of a worker's own tokens times its `share`, ready for backward.

    A worker without counted tokens has no mean (0 / 0), but must take part in backward, as other ranks' tokens attend
    to its own: its loss is a zero computed from the output.
    """
    if share:
        return loss(output, batch) * share
    reached = [x for x in tensors(output) if x.requires_grad]
    return torch.stack([(x * 0.0).sum() for x in reached]).sum()


def with_positions(inputs: Batch, split: SequenceSplit, rank: int, name: str = "position_ids") -> Batch:
    """`inputs` with the positions ``[1, local]`` of the worker's tokens added as `name`.

    Returns `inputs` unchanged if they are no keywords, or have positions already.
    """
    if not isinstance(inputs, Mapping) or inputs.get(name) is not None:
        return inputs
    device = next((x.device for x in tensors(inputs)), None)
    return {**inputs, name: split.positions(rank, device)[None]}
