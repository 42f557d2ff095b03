"""The collective operations of all workers, or of some of them, as coroutines.

Each ``yield work`` receives the result of a collective operation. So a caller can start several operations before it
waits for the first.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from unisono.comm import Communicator, Work

T = TypeVar("T")
Steps = Generator[Work[Any], Any, T]
_ADDS = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8}


class Group(Protocol):
    """Collective operations of the members of a process set.

    Attributes:
        rank: of this worker among the members; 0 in a worker that is no member, which calls all operations alike, with
            tensors of the same shapes, whose content does not count.
        size: the number of members.
    """

    rank: int
    size: int

    def sum(self, x: Tensor) -> Work[Tensor] | None:
        """The sum of all `x`, which may be overwritten; None: only `exchange` and `gather` can take it."""

    def gather(self, x: Tensor) -> Steps[Tensor]:
        """The `x` of all members, shape ``[size, *x.shape]``."""

    def broadcast(self, x: Tensor, root: int) -> Steps[None]:
        """Copy the `x` of member `root` into the `x` of all."""

    def exchange(self, xs: Sequence[Tensor], like: Sequence[Tensor]) -> Steps[list[Tensor]]:
        """As `Communicator.exchange`."""


class AllWorkers:
    """The group of all workers."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size, self.comm = comm.rank, comm.size, comm

    def sum(self, x: Tensor) -> Work[Tensor] | None:
        return self.comm.sum(x) if x.dtype in _ADDS else None

    def gather(self, x: Tensor) -> Steps[Tensor]:
        return (yield self.comm.gather(x))  # type: ignore[no-any-return]

    def broadcast(self, x: Tensor, root: int) -> Steps[None]:
        yield self.comm.broadcast(x, root)

    def exchange(self, xs: Sequence[Tensor], like: Sequence[Tensor]) -> Steps[list[Tensor]]:
        return (yield self.comm.exchange(xs, like))  # type: ignore[no-any-return]


class SomeWorkers:
    """The group of the workers `ranks`. All workers of `comm` take part in its operations, the others without data.

    Args:
        ranks: of the members, ascending.
    """

    def __init__(self, comm: Communicator, ranks: Sequence[int]) -> None:
        self._comm, self._ranks = comm, ranks
        self.size, self._member = len(ranks), comm.rank in ranks
        self.rank = ranks.index(comm.rank) if self._member else 0

    def sum(self, x: Tensor) -> None:
        return None

    def gather(self, x: Tensor) -> Steps[Tensor]:
        return torch.stack((yield from self.exchange([x] * self.size, [x] * self.size)))

    def broadcast(self, x: Tensor, root: int) -> Steps[None]:
        nothing = x.new_empty(0)
        sends = [x if self.rank == root else nothing] * self.size
        expects = [x if member == root else nothing for member in range(self.size)]
        received = yield from self.exchange(sends, expects)
        if self._member and self.rank != root:
            x.copy_(received[root])

    def exchange(self, xs: Sequence[Tensor], like: Sequence[Tensor]) -> Steps[list[Tensor]]:
        if not self._member:
            yield self._comm.swap({}, {})
            return [torch.zeros_like(x) for x in like]
        arrived = yield self._comm.swap(self._others(xs), self._others(like))
        return [
            xs[i].clone() if rank == self._comm.rank else arrived[rank].view(like[i].shape)
            for i, rank in enumerate(self._ranks)
        ]

    def _others(self, tensors: Sequence[Tensor]) -> Mapping[int, Tensor]:
        return {rank: x for rank, x in zip(self._ranks, tensors) if rank != self._comm.rank}
