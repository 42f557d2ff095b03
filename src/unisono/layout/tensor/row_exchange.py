"""Queries, keys and values in one matrix: kept in plain boxes of rows, handed to those who need them.

The rows of such a matrix lie block by block (all queries, all keys, all values), and a worker needs its heads'
share of every block. Its checkpoint, optimizer and FSDP want one box of rows. So the box is kept, and rows
change places by one all-to-all when the forward pass begins; their gradients go the same way back. Nothing is
summed: it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from unisono.layout.tensor.linear_modules import grouped_rows


@dataclass(frozen=True)
class RowExchange:
    """Which rows of a matrix of `outputs` rows in `groups` blocks go where, seen by one of them."""

    outputs: int
    groups: int
    degree: int
    member: int

    def prepare(self) -> RowExchange:
        """Count rows now: a forward pass may be one that knows shapes alone."""
        _ = self.order, self.sent, self.received
        return self

    @cached_property
    def order(self) -> Tensor:
        """The rows of this member's box, those for member 0 first."""
        return torch.cat([self._common(self.member, other) for other in range(self.degree)])

    @cached_property
    def sent(self) -> list[int]:
        """How many rows go to each member."""
        return [len(self._common(self.member, other)) for other in range(self.degree)]

    @cached_property
    def received(self) -> list[int]:
        """How many rows come from each member; in the order of their numbers, as the members' boxes are."""
        return [len(self._common(other, self.member)) for other in range(self.degree)]

    def exchange(self, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> tuple[Tensor, Tensor | None]:
        """The rows that this member computes, out of all members' boxes of rows; differentiable.

        Args:
            weight: this member's box (outputs / degree, inputs).
            bias: its biases (outputs / degree,).
        """
        if bias is None:
            return self._moved(weight, group), None
        both = self._moved(torch.cat([weight, bias.unsqueeze(1)], 1), group)
        return both[:, :-1], both[:, -1]

    def _moved(self, box: Tensor, group: dist.ProcessGroup) -> Tensor:
        leaving = box.index_select(0, self.order.to(box.device))
        return collectives.all_to_all_single_autograd(leaving, self.received, self.sent, group)

    def _common(self, holder: int, user: int) -> Tensor:
        share = self.outputs // self.degree
        wanted = grouped_rows(self.outputs, self.groups, self.degree, user)
        return wanted[(wanted // share) == holder] - holder * share
