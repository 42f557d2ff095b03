"""Work on the made-up clock: when it is over is a number, and waiting for it moves the clock there."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Protocol

from unisono.errors import CommunicationError, PeerLost


class Clock(Protocol):
    """What work has to ask of the world."""

    def check(self, rank: int) -> None:
        """Raises `Lost` where `rank` is lost."""

    def now(self, rank: int) -> float:
        """Seconds on the clock of `rank`."""

    def expire(self, works: Sequence[VirtualWork]) -> None:
        """Fail what is beyond its deadline."""

    def wait(self, rank: int, works: Sequence[VirtualWork]) -> None:
        """Until the first of `works` is over."""

    def unfinished(self, rank: int) -> Sequence[VirtualWork]:
        """What `rank` has started and what is not over."""


class VirtualWork:
    """Something that worker `rank` has started, at `start`, and that is over at `finish` (infinity: not known)."""

    verb = ""
    peers: Sequence[int] = ()

    def __init__(self, clock: Clock, rank: int) -> None:
        self._clock, self.rank = clock, rank
        self.start, self.finish = 0.0, math.inf
        self.error: CommunicationError | None = None
        self._polled_at = -1.0

    @property
    def settled(self) -> bool:
        """Result and finish time are known; the latter may lie in the future."""
        return self.finish < math.inf

    @property
    def named(self) -> str:
        """As an error names it."""
        raise NotImplementedError

    def overdue(self, timeout_seconds: float) -> PeerLost:
        """The error when nothing has come within the deadline."""
        raise NotImplementedError

    def poll(self) -> bool:
        """As the contract. A worker that polls the same work again and again with nothing in between is taken
        for one that waits: its clock moves to when the first of its works is there."""
        self._clock.check(self.rank)
        self._clock.expire([self])
        now = self._clock.now(self.rank)
        if self.finish > now and self._polled_at == now:
            self._clock.wait(self.rank, self._clock.unfinished(self.rank))
        self._polled_at = self._clock.now(self.rank)
        return self.finish <= self._polled_at

    def until_over(self) -> None:
        """Move the clock to the finish time if that is later. Raises what the work has failed with."""
        self._clock.check(self.rank)
        while self.finish > self._clock.now(self.rank):
            self._clock.wait(self.rank, [self])
        if self.error:
            raise copy.copy(self.error)
