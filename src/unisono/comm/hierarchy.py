"""A process group on two levels: the workers of each host, and one worker of each host.

Inputs are first combined within each host, through shared memory. The result then crosses the network once per host,
and not once per worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from unisono.comm.work import Work
from unisono.errors import PeerLost

T = TypeVar("T")


@dataclass(frozen=True)
class Hierarchy:
    """The communicators of both levels, as one worker has them.

    Args:
        intra_node: the workers of this host.
        inter_node: the first worker of every host; None on all other workers.
    """

    intra_node: SubCommunicator
    inter_node: SubCommunicator | None

    def channel(self, name: str) -> Hierarchy:
        """Collective: a duplicate of both levels."""
        return Hierarchy(self.intra_node.channel(name), self.inter_node.channel(name) if self.inter_node else None)

    def wait_without_deadline(self) -> None:
        """See `Communicator.wait_without_deadline`."""
        for part in (self.intra_node, self.inter_node):
            if part:
                part.wait_without_deadline()

    @property
    def bytes_sent(self) -> int:
        """Payload bytes sent by this worker on both levels."""
        return self.intra_node.bytes_sent + (self.inter_node.bytes_sent if self.inter_node else 0)

    def close(self) -> None:
        """See `Communicator.close`."""
        for part in (self.intra_node, self.inter_node):
            if part:
                part.close()


class SubCommunicator:
    """The communicator of a part of a group, whose `PeerLost` has the ranks of the whole group.

    Args:
        comm: the communicator of the part.
        ranks: the ranks of the part's workers in the whole group, in the order of their ranks in the part.
    """

    def __init__(self, comm: Any, ranks: Sequence[int]) -> None:
        self._comm, self._ranks = comm, ranks
        self.rank, self.size = comm.rank, comm.size

    @property
    def bytes_sent(self) -> int:
        """See `Communicator.bytes_sent`."""
        return int(self._comm.bytes_sent)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Communicator.allocate`."""
        memory: Tensor = self._comm.allocate(numel, dtype)
        return memory

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Work[Tensor]:
        """See `Communicator.sum`."""
        return _TranslatedWork(self._comm.sum(x, dtype), self._ranks)

    def gather(self, x: Tensor) -> Work[Tensor]:
        """See `Communicator.gather`."""
        return _TranslatedWork(self._comm.gather(x), self._ranks)

    def broadcast(self, x: Tensor, root: int = 0) -> Work[Tensor]:
        """See `Communicator.broadcast`."""
        return _TranslatedWork(self._comm.broadcast(x, root), self._ranks)

    def exchange(self, xs: Sequence[Tensor], like: Sequence[Tensor]) -> Work[list[Tensor]]:
        """See `Communicator.exchange`."""
        return _TranslatedWork(self._comm.exchange(xs, like), self._ranks)

    def swap(self, xs: Mapping[int, Tensor], like: Mapping[int, Tensor]) -> Work[dict[int, Tensor]]:
        """See `Communicator.swap`."""
        return _TranslatedWork(self._comm.swap(xs, like), self._ranks)

    def channel(self, name: str) -> SubCommunicator:
        """See `Communicator.channel`."""
        return SubCommunicator(self._comm.channel(name), self._ranks)

    def wait_without_deadline(self) -> None:
        """See `Communicator.wait_without_deadline`."""
        self._comm.wait_without_deadline()

    def now(self) -> float:
        """See `Communicator.now`."""
        return float(self._comm.now())

    def close(self) -> None:
        """See `Communicator.close`."""
        self._comm.close()


class _TranslatedWork(Generic[T]):
    """A work whose `PeerLost` has the ranks of the whole group."""

    def __init__(self, work: Work[T], ranks: Sequence[int]) -> None:
        self._work, self._ranks = work, ranks

    def poll(self) -> bool:
        return self._work.poll()

    def wait(self) -> T:
        with with_global_ranks(self._ranks):
            return self._work.wait()


@contextmanager
def with_global_ranks(ranks: Sequence[int]) -> Iterator[None]:
    """A context for operations of a part of a group, which makes `PeerLost` name ranks of the whole group.

    Rank *r* of the part is rank ``ranks[r]`` of the whole group.
    """
    try:
        yield
    except PeerLost as lost:
        raise PeerLost([ranks[r] for r in lost.ranks], lost.during, lost.detail) from lost
