"""The workers that share a sequence, as attention sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# The names on the right warn in newer versions, those on the left are missing in older ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PendingTensor(Protocol):
    """A tensor on its way here."""

    def wait(self) -> Tensor:
        """The tensor."""
        ...


@dataclass(frozen=True)
class Received:
    """A `PendingTensor` that has arrived."""

    tensor: Tensor

    def wait(self) -> Tensor:
        return self.tensor


class Peers(Protocol):
    """The workers of a context group. All call the same verbs in the same order, with tensors of the same shape."""

    @property
    def rank(self) -> int:
        """Which of them this is."""
        ...

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    def gather(self, mine: Tensor) -> Tensor:
        """Everybody's tensor ``[size, ...]``, by rank. Its gradients find their way back to where each came from."""
        ...

    def ring_shift(self, mine: Tensor) -> PendingTensor:
        """Send `mine` to the next worker of the ring and receive the previous one's; it returns at once."""
        ...


class GroupPeers:
    """The workers of a torch process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def gather(self, mine: Tensor) -> Tensor:
        """See `Peers`; one all-gather, in backward one reduce-scatter."""
        gathered: Tensor = _Gather.apply(mine.reshape(-1), self.group, self.size)  # type: ignore[no-untyped-call]
        return gathered.view(self.size, *mine.shape)

    def ring_shift(self, mine: Tensor) -> PendingTensor:
        landing = torch.empty_like(mine)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, mine, group=self.group, group_peer=after),
            dist.P2POp(dist.irecv, landing, group=self.group, group_peer=before),
        ])  # fmt: skip
        return _Transfer(works, mine, landing)


def as_peers(group: dist.ProcessGroup | DeviceMesh | Peers) -> Peers:
    """`group` as `Peers`; a mesh must have one dimension."""
    if isinstance(group, DeviceMesh):
        return GroupPeers(group.get_group())
    return GroupPeers(group) if isinstance(group, dist.ProcessGroup) else group


class _Transfer:
    def __init__(self, works: list[dist.Work], leaving: Tensor, landing: Tensor) -> None:
        self._works, self._leaving, self._landing = works, leaving, landing  # gloo needs `leaving` until it has left

    def wait(self) -> Tensor:
        while self._works:
            self._works.pop().wait()
        del self._leaving
        return self._landing


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
        ctx.group, ctx.numbers = group, mine.numel()
        everybody = mine.new_empty(size * mine.numel())
        _all_gather(everybody, mine.contiguous(), group=group)
        return everybody

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        mine = gradient.new_empty(ctx.numbers)
        _reduce_scatter(mine, gradient.contiguous(), group=ctx.group)
        return mine, None, None
