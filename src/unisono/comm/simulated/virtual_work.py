"""Work on the virtual clock: its finish time is a number, and waiting for it moves the clock there."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Protocol

from unisono.errors import CommunicationError, PeerLost


class Clock(Protocol):
    """The part of `SimulatedWorld` that a work needs."""

    def check(self, rank: int) -> None:
        """Raises `Lost` if worker `rank` is lost."""

    def now(self, rank: int) -> float:
        """Seconds on the clock of worker `rank`."""

    def expire(self, works: Sequence[VirtualWork]) -> None:
        """Fail those of `works` whose deadline has passed."""

    def wait(self, rank: int, works: Sequence[VirtualWork]) -> None:
        """Move the clock of worker `rank` until the first of `works` finishes, or a deadline passes."""

    def unfinished(self, rank: int) -> Sequence[VirtualWork]:
        """The works that worker `rank` has started and that have not finished."""


class VirtualWork:
    """An operation or call that worker `rank` started at `start`; it finishes at `finish` (infinity: not known)."""

    verb = ""
    peers: Sequence[int] = ()

    def __init__(self, clock: Clock, rank: int) -> None:
        self._clock, self.rank = clock, rank
        self.start, self.finish = 0.0, math.inf
        self.error: CommunicationError | None = None
        self._polled_at = -1.0

    @property
    def settled(self) -> bool:
        """Whether the result and the finish time are known; that time may be in the future."""
        return self.finish < math.inf

    @property
    def description(self) -> str:
        """The work in words, for the text of errors."""
        raise NotImplementedError

    def overdue(self, timeout_seconds: float) -> PeerLost:
        """The error of this work once its deadline has passed."""
        raise NotImplementedError

    def poll(self) -> bool:
        """See `Work.poll`. A second poll at the same virtual time counts as a wait.

        The clock then moves to the time at which the first of the worker's unfinished works finishes: polling takes no
        virtual time, so a loop that polls would never end otherwise.
        """
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
