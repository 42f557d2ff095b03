"""When an evicted worker may join again: after growing pauses, so that a worker that keeps freezing costs little."""

from __future__ import annotations

from dataclasses import dataclass, field

_FIRST_SECONDS = 1.0
_PER_MEMBER_SECONDS = 4.0
_LONGEST_SECONDS = 600.0


@dataclass
class Readmission:
    """Pauses of one worker after it was evicted for its silence.

    After the first eviction there is no pause, after each further one in a row the pause is twice as long. An eviction
    costs every member about a second. A worker that has worked for four seconds per member has made up for that, which
    ends the row; for the same reason no pause is longer than this.

    Args:
        joined: when the worker joined the view.
    """

    joined: float
    pause_seconds: float = field(default=0.0, init=False)
    _next_seconds: float = field(default=0.0, init=False)
    _until: float = field(default=float("-inf"), init=False)

    def join(self, now: float) -> None:
        """The worker joins a view."""
        self.joined = now

    def evict(self, members: int, now: float) -> None:
        """The worker is evicted from a view of so many members."""
        longest = min(_PER_MEMBER_SECONDS * members, _LONGEST_SECONDS)
        if now - self.joined >= longest:
            self._next_seconds = 0.0
        self.pause_seconds = self._next_seconds
        self._next_seconds = min(max(_FIRST_SECONDS, 2 * self.pause_seconds), longest)
        self.joined = now

    def come_back(self, now: float) -> None:
        """The evicted worker is heard again: its pause begins."""
        self._until = now + self.pause_seconds

    def pauses(self, now: float) -> bool:
        """Whether the worker may not join yet."""
        return now < self._until
