"""Membership as the training loop uses it between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Presence(Protocol):
    """One worker's membership in the current view. Its methods do not block.

    Attributes:
        changing: whether workers may join and leave.
    """

    changing: bool

    @property
    def stop(self) -> bool:
        """This worker was asked to stop the run. All workers stop, after the same step."""

    @property
    def parting(self) -> bool:
        """The view is to end, after a step that all members take."""

    @property
    def leaving(self) -> bool:
        """This worker was asked to leave, while the others continue."""

    def name_of(self, rank: int) -> str:
        """The name of the worker with that rank, in messages of the launcher and as that of its log."""

    def leave(self) -> None:
        """Have this worker leave, as if it had been asked to. No effect in a group that does not change."""

    def check(self) -> None:
        """Before a micro-batch is computed, and before a step is applied. Raises `PeerLost` if this worker was
        evicted."""

    def stepped(self) -> None:
        """This worker has applied a step; `done` commits it, perhaps later."""

    def done(self, steps: int = 1) -> None:
        """So many more steps are committed."""


class Unchanging:
    """A group that does not change.

    Args:
        stop_asked: True once this worker was asked to stop.
    """

    changing = parting = leaving = False

    def __init__(self, stop_asked: Callable[[], bool] = lambda: False) -> None:
        self._stop_asked = stop_asked

    @property
    def stop(self) -> bool:
        return self._stop_asked()

    def name_of(self, rank: int) -> str:
        return str(rank)

    def leave(self) -> None:
        pass

    def check(self) -> None:
        pass

    def stepped(self) -> None:
        pass

    def done(self, steps: int = 1) -> None:
        pass
