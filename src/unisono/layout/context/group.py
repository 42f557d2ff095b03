"""The ranks that share a sequence, and the messages between them that attention needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# Newer versions of torch deprecate the names on the right, older ones lack those on the left.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PendingTensor(Protocol):
    """A tensor that is being received."""

    def wait(self) -> Tensor:
        """Wait for the tensor."""
        ...


@dataclass(frozen=True)
class Received:
    """A `PendingTensor` that has arrived."""

    tensor: Tensor

    def wait(self) -> Tensor:
        return self.tensor


class Peers(Protocol):
    """The ranks of a context group. All call the same operations in the same order, with tensors of the same shape."""

    @property
    def rank(self) -> int:
        """This rank's index in the group."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def gather(self, mine: Tensor) -> Tensor:
        """Collective: the tensors of all ranks ``[size, ...]``. Gradients flow back to the rank that each came from."""
        ...

    def ring_shift(self, mine: Tensor) -> PendingTensor:
        """Collective: start to send `mine` to the next rank of the ring, and to receive the previous rank's tensor."""
        ...


class GroupPeers:
    """The ranks of a torch process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def gather(self, mine: Tensor) -> Tensor:
        """One all-gather; in backward, one reduce-scatter."""
        gathered: Tensor = _Gather.apply(mine.reshape(-1), self.group, self.size)  # type: ignore[no-untyped-call]
        return gathered.view(self.size, *mine.shape)

    def ring_shift(self, mine: Tensor) -> PendingTensor:
        received = torch.empty_like(mine)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, mine, group=self.group, group_peer=after),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=before),
        ])  # fmt: skip
        return _Transfer(works, mine, received)


def as_peers(group: dist.ProcessGroup | DeviceMesh | Peers) -> Peers:
    """`group` as `Peers`; a mesh must have one dimension."""
    if isinstance(group, DeviceMesh):
        return GroupPeers(group.get_group())
    return GroupPeers(group) if isinstance(group, dist.ProcessGroup) else group


class _Transfer:
    def __init__(self, works: list[dist.Work], sent: Tensor, received: Tensor) -> None:
        self._works, self._sent, self._received = works, sent, received  # gloo requires that `sent` outlives the send

    def wait(self) -> Tensor:
        while self._works:
            self._works.pop().wait()
        del self._sent
        return self._received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
        ctx.group, ctx.numbers = group, mine.numel()
        gathered = mine.new_empty(size * mine.numel())
        _all_gather(gathered, mine.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        mine = gradient.new_empty(ctx.numbers)
        _reduce_scatter(mine, gradient.contiguous(), group=ctx.group)
        return mine, None, None
