"""Who is present, as the training loop asks and tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Presence(Protocol):
    """One worker's ear and mouth between steps; nothing here waits.

    Attributes:
        changing: whether workers may come and go at all.
    """

    changing: bool

    @property
    def stop(self) -> bool:
        """This worker was asked to stop the run: all do, after a step that all take."""

    @property
    def parting(self) -> bool:
        """The workers present are to change, after a step that all take."""

    @property
    def leaving(self) -> bool:
        """This worker was asked to go, while the others go on."""

    def name_of(self, rank: int) -> str:
        """What the worker of that number is called: in the launcher's words, and by its log."""

    def leave(self) -> None:
        """This worker is to go, as if it had been asked to; nothing happens where workers do not come and go."""

    def check(self) -> None:
        """Right before a micro-batch is computed, and before a step is taken. Raises `PeerLost` if the others go on
        without this worker."""

    def stepped(self) -> None:
        """This worker has taken a step; whether it counts may be said later, by `done`."""

    def done(self, steps: int = 1) -> None:
        """So many more steps are in the state."""


class Unchanging:
    """The same workers from the beginning to the end.

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
