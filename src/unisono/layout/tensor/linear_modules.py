"""Modules that multiply by one matrix, independent of how they store it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Matrix:
    """A module that multiplies by a matrix: ``nn.Linear``, or transformers' ``Conv1D``, which stores it transposed.

    Args:
        module: the module that owns ``weight`` and ``bias``.
        output_dimension: the dimension of ``weight`` that counts outputs.
    """

    module: nn.Module
    output_dimension: int

    @property
    def weight(self) -> Tensor:
        """The parameter as the module stores it."""
        return cast(Tensor, self.module.weight)

    @property
    def bias(self) -> Tensor | None:
        """The bias (outputs,), or None."""
        return cast("Tensor | None", self.module.bias)

    @property
    def outputs(self) -> int:
        """The number of output features."""
        return self.weight.shape[self.output_dimension]

    @property
    def inputs(self) -> int:
        """The number of input features."""
        return self.weight.shape[1 - self.output_dimension]

    def upright(self, weight: Tensor) -> Tensor:
        """`weight` as (outputs, inputs)."""
        return weight if self.output_dimension == 0 else weight.t()


def matrix(module: nn.Module) -> Matrix | None:
    """`module` as a matrix; None for other modules, and for subclasses that override forward."""
    forward = type(module).forward
    if forward is nn.Linear.forward:
        return Matrix(module, 0)
    if type(module).__name__ == "Conv1D" and {"nf", "nx"} <= vars(module).keys():
        return Matrix(module, 1)
    return None


def is_vocabulary(module: nn.Module) -> bool:
    """Whether `module` is an embedding that only looks up rows: without `max_norm`, and with dense gradients."""
    plain = type(module).forward is nn.Embedding.forward
    return plain and getattr(module, "max_norm", None) is None and not getattr(module, "sparse", False)


def grouped_rows(outputs: int, groups: int, degree: int, member: int) -> Tensor:
    """The rows of a matrix of `groups` equal blocks that rank `member` computes, in order."""
    rows = torch.arange(outputs)
    block = outputs // groups
    return rows[(rows % block) // (block // degree) == member]


def embedded(module: nn.Embedding, weight: Tensor, tokens: Tensor, first: int) -> Tensor:
    """The embeddings of `tokens` whose rows are in `weight`, which begins at row `first`; zeros for other tokens."""
    local = tokens - first
    mine = (local >= 0) & (local < len(weight))
    padding = None if module.padding_idx is None else module.padding_idx - first
    if padding is not None and not 0 <= padding < len(weight):
        padding = None
    rows = F.embedding(local.where(mine, local.new_zeros(())), weight, padding)
    return rows * mine.unsqueeze(-1).to(rows.dtype)
