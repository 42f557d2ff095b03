"""The members of a group as threads of one process: a model tried as if it were spread, without any network.

One of them runs at a time, until it waits for the others or ends, and all draw the same random numbers.
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
    """Members did not exchange equally often; the message says which of them left the others waiting."""


class ThreadedGroup:
    """One of several `Peers` in one process. What is gathered stays in one graph, so that backward runs through all."""

    def __init__(self, rank: int, board: SharedExchange) -> None:
        self.rank, self.size, self._shared = rank, board.size, board
        self._exchanges = 0

    def gather(self, mine: Tensor) -> Tensor:
        return torch.stack(self._exchange(mine))

    def ring_shift(self, mine: Tensor) -> PendingTensor:
        """See `Peers`; gradients do not go this way."""
        return Received(self._exchange(mine)[self.rank - 1].detach().clone())

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        self._exchanges += 1
        return self._shared.exchange(self.rank, self._exchanges, mine)


class SharedExchange:
    """Where members put what they exchange. None of them waits for a member that has ended.

    Attributes:
        turn: held by the member that runs.
    """

    def __init__(self, size: int, generators: Generators) -> None:
        self.size, self._generators = size, generators
        self.lock = threading.Condition()
        self._rounds: dict[int, dict[int, Tensor]] = {}
        self._ended: dict[int, Exception | None] = {}

    def exchange(self, rank: int, number: int, mine: Tensor) -> list[Tensor]:
        """What all members gave in exchange `number`, by rank.

        Raises:
            Apart: a member has ended without it.
        """
        given = self._rounds.setdefault(number, {})
        given[rank] = mine
        drawn = self._generators.states()
        self.lock.notify_all()
        self.lock.wait_for(lambda: len(given) == self.size or self._ended.keys() - given.keys())
        self._generators.restore(drawn)
        if len(given) < self.size:
            gone = min(self._ended.keys() - given.keys())
            raise GroupMismatch(f"part {rank} exchanges keys and values once more than part {gone}")
        return [given[each] for each in range(self.size)]

    def end(self, rank: int, error: Exception | None) -> None:
        """The member exchanges nothing more."""
        self._ended[rank] = error
        self.lock.notify_all()

    def check(self) -> None:
        """Raise the first error that is not about what another member did."""
        errors = [error for error in self._ended.values() if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, GroupMismatch)):
            raise error


def run_members(
    size: int, member: Callable[[ThreadedGroup], Any], generators: Generators, drawn: Sequence[Tensor]
) -> list[Any]:
    """What each of `size` members returns, by rank; the first error of any of them is raised.

    Args:
        drawn: the states of `generators` with which each begins.
    """
    board = SharedExchange(size, generators)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        with board.lock:
            generators.restore(drawn)
            try:
                results[rank] = member(ThreadedGroup(rank, board))
            except Exception as error:
                board.end(rank, error)
            else:
                board.end(rank, None)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    board.check()
    return results
