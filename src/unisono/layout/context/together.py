"""The members of a group as threads of one process: a model tried as if it were spread, without any network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.layout.context.peers import Coming

PATIENCE_SECONDS = 300.0


class Together:
    """One of several `Peers` in one process. What is gathered stays in one graph, so that backward runs through all."""

    def __init__(self, rank: int, board: list[Any], meeting: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._meeting = rank, len(board), board, meeting

    def gather(self, mine: Tensor) -> Tensor:
        """See `Peers`."""
        return torch.stack(self._everybody(mine))

    def pass_on(self, mine: Tensor) -> Coming:
        """See `Peers`; gradients do not go this way."""
        return _There(self._everybody(mine)[self.rank - 1].detach().clone())

    def _everybody(self, mine: Tensor) -> list[Tensor]:
        self._board[self.rank] = mine
        self._meeting.wait(PATIENCE_SECONDS)
        everybody = list(self._board)
        self._meeting.wait(PATIENCE_SECONDS)
        return everybody


class _There:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor


def together(size: int, member: Callable[[Together], Any]) -> list[Any]:
    """What each of `size` members returns, by rank; the first error of any of them is raised."""
    meeting = threading.Barrier(size)
    board: list[Any] = [None] * size
    results: list[Any] = [None] * size
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            results[rank] = member(Together(rank, board, meeting))
        except threading.BrokenBarrierError:
            pass  # whoever broke it has said why
        except Exception as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
