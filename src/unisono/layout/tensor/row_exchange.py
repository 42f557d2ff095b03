"""Exchanges the rows of one matrix that contains queries, keys and values between ranks.

The rows of such a matrix are stored block by block (all queries, all keys, all values), and a worker needs its heads'
part of every block. Checkpoint, optimizer and FSDP need one box of rows per worker. So each worker stores one box, and
rows are exchanged by one all-to-all when the forward pass begins; gradients take the reverse path. Nothing is summed,
so the exchange is exact.
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
    """The exchange of a matrix of `outputs` rows in `groups` blocks, for rank `member` of `degree` ranks."""

    outputs: int
    groups: int
    degree: int
    member: int

    def prepare(self) -> RowExchange:
        """Compute the indices now: a forward pass may run on the meta device."""
        _ = self.order, self.sent, self.received
        return self

    @cached_property
    def order(self) -> Tensor:
        """The rows of this rank's box, sorted by receiver."""
        return torch.cat([self._common(self.member, other) for other in range(self.degree)])

    @cached_property
    def sent(self) -> list[int]:
        """The number of rows for each rank."""
        return [len(self._common(self.member, other)) for other in range(self.degree)]

    @cached_property
    def received(self) -> list[int]:
        """The number of rows from each rank. Rows arrive in the order of the whole matrix, as ranks hold its boxes in
        order."""
        return [len(self._common(other, self.member)) for other in range(self.degree)]

    def exchange(self, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> tuple[Tensor, Tensor | None]:
        """Collective: the rows that this rank computes, from all ranks' boxes; differentiable.

        Args:
            weight: this rank's box (outputs / degree, inputs).
            bias: the biases of these rows (outputs / degree,).
        """
        if bias is None:
            return self._moved(weight, group), None
        both = self._moved(torch.cat([weight, bias.unsqueeze(1)], 1), group)
        return both[:, :-1], both[:, -1]

    def _moved(self, box: Tensor, group: dist.ProcessGroup) -> Tensor:
        rows = box.index_select(0, self.order.to(box.device))
        return collectives.all_to_all_single_autograd(rows, self.received, self.sent, group)

    def _common(self, holder: int, user: int) -> Tensor:
        share = self.outputs // self.degree
        wanted = grouped_rows(self.outputs, self.groups, self.degree, user)
        return wanted[(wanted // share) == holder] - holder * share
