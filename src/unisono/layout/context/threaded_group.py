"""The ranks of a group as threads of one process, to verify a split model without a network.

One thread runs at a time, until it waits for the others or ends, and all draw the same random numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.layout.context.group import PendingTensor, Received
from unisono.layout.pipeline.rng_states import Generators


class GroupMismatch(ValueError):
    """Ranks exchanged different numbers of tensors; the message names the ranks."""


class ThreadedGroup:
    """`Peers` of one rank, where every rank is a thread of this process.

    Gathered tensors stay in one autograd graph, so that backward runs through all ranks.
    """

    def __init__(self, rank: int, shared: SharedExchange) -> None:
        self.rank, self.size, self._shared = rank, shared.size, shared
        self._exchanges = 0

    def gather(self, mine: Tensor) -> Tensor:
        return torch.stack(self._exchange(mine))

    def ring_shift(self, mine: Tensor) -> PendingTensor:
        """The previous rank's tensor, without gradients."""
        return Received(self._exchange(mine)[self.rank - 1].detach().clone())

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        self._exchanges += 1
        return self._shared.exchange(self.rank, self._exchanges, mine)


class SharedExchange:
    """Exchanges tensors between the threads. No thread waits for a thread that has ended.

    Attributes:
        lock: held by the thread that runs.
    """

    def __init__(self, size: int, generators: Generators) -> None:
        self.size, self._generators = size, generators
        self.lock = threading.Condition()
        self._rounds: dict[int, dict[int, Tensor]] = {}
        self._ended: dict[int, Exception | None] = {}

    def exchange(self, rank: int, number: int, mine: Tensor) -> list[Tensor]:
        """Collective: the tensors of all ranks in exchange `number`, by rank.

        Raises:
            GroupMismatch: another rank has ended without this exchange.
        """
        given = self._rounds.setdefault(number, {})
        given[rank] = mine
        drawn = self._generators.states()
        self.lock.notify_all()
        self.lock.wait_for(lambda: len(given) == self.size or self._ended.keys() - given.keys())
        self._generators.restore(drawn)
        if len(given) < self.size:
            ended = min(self._ended.keys() - given.keys())
            raise GroupMismatch(f"part {rank} exchanges keys and values once more than part {ended}")
        return [given[each] for each in range(self.size)]

    def end(self, rank: int, error: Exception | None) -> None:
        """Mark a rank as ended, by `error` or without one."""
        self._ended[rank] = error
        self.lock.notify_all()

    def check(self) -> None:
        """Raise the first error of any rank. A `GroupMismatch` may be a consequence of another error, which is raised
        instead."""
        errors = [error for error in self._ended.values() if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, GroupMismatch)):
            raise error


def run_members(
    size: int, member: Callable[[ThreadedGroup], Any], generators: Generators, drawn: Sequence[Tensor]
) -> list[Any]:
    """The results of `member` on each of `size` ranks, by rank; raises the first error of any rank.

    Args:
        drawn: the states of `generators` in which each rank begins.
    """
    shared = SharedExchange(size, generators)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        with shared.lock:
            generators.restore(drawn)
            try:
                results[rank] = member(ThreadedGroup(rank, shared))
            except Exception as error:
                shared.end(rank, error)
            else:
                shared.end(rank, None)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared.check()
    return results
