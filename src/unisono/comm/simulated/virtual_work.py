"""Work on the virtual clock: its finish time is a number, and waiting for it moves the clock there."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Protocol

from unisono.errors import CommunicationError, PeerLost


class Clock(Protocol):
    """What a work needs of its simulated world."""

    def check(self, rank: int) -> None:
        """Raises `Lost` if worker `rank` is lost."""

    def now(self, rank: int) -> float:
        """Seconds on the clock of worker `rank`."""

    def expire(self, works: Sequence[VirtualWork]) -> None:
        """Fail works whose deadline has passed."""

    def wait(self, rank: int, works: Sequence[VirtualWork]) -> None:
        """Wait for the first of `works`."""

    def unfinished(self, rank: int) -> Sequence[VirtualWork]:
        """The works that worker `rank` has started and that have not finished."""


class VirtualWork:
    """What worker `rank` has started at `start`, and what finishes at `finish` (infinity: not known)."""

    verb = ""
    peers: Sequence[int] = ()

    def __init__(self, clock: Clock, rank: int) -> None:
        self._clock, self.rank = clock, rank
        self.start, self.finish = 0.0, math.inf
        self.error: CommunicationError | None = None
        self._polled_at = -1.0

    @property
    def settled(self) -> bool:
        """Whether result and finish time are known; the latter may be in the future."""
        return self.finish < math.inf

    @property
    def description(self) -> str:
        """The work for errors."""
        raise NotImplementedError

    def overdue(self, timeout_seconds: float) -> PeerLost:
        """The error once its deadline has passed."""
        raise NotImplementedError

    def poll(self) -> bool:
        """As the contract. Polling the same work repeatedly, with nothing in between, counts as waiting: the clock
        moves to the finish of the worker's first work."""
        self._clock.check(self.rank)
        self._clock.expire([self])
        now = self._clock.now(self.rank)
        if self.finish > now and self._polled_at == now:
            self._clock.wait(self.rank, self._clock.unfinished(self.rank))
        self._polled_at = self._clock.now(self.rank)
        return self.finish <= self._polled_at

    def wait_until_finished(self) -> None:
        """Move the clock to the finish time if that is later. Raises the work's error."""
        self._clock.check(self.rank)
        while self.finish > self._clock.now(self.rank):
            self._clock.wait(self.rank, [self])
        if self.error:
            raise copy.copy(self.error)
