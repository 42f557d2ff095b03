"""When an evicted worker may join again: quarantines grow, so that a worker that freezes repeatedly costs little."""

from __future__ import annotations

from dataclasses import dataclass, field

_FIRST_SECONDS = 1.0
_PER_MEMBER_SECONDS = 4.0
_LONGEST_SECONDS = 600.0


@dataclass
class Readmission:
    """Quarantines of one worker after evictions.

    The first eviction has no quarantine; each further one in a row has a quarantine twice as long. An eviction costs
    every member about a second. A worker that has trained for four seconds per member has compensated for that, which
    ends the row. For the same reason no quarantine is longer than this.

    Args:
        joined_at: when the worker joined the view.
    """

    joined_at: float
    quarantine_seconds: float = field(default=0.0, init=False)
    _next_seconds: float = field(default=0.0, init=False)
    _until: float = field(default=float("-inf"), init=False)

    def join(self, now: float) -> None:
        """The worker joins a view."""
        self.joined_at = now

    def evict(self, members: int, now: float) -> None:
        """The worker is evicted from a view of `members`."""
        longest = min(_PER_MEMBER_SECONDS * members, _LONGEST_SECONDS)
        if now - self.joined_at >= longest:
            self._next_seconds = 0.0
        self.quarantine_seconds = self._next_seconds
        self._next_seconds = min(max(_FIRST_SECONDS, 2 * self.quarantine_seconds), longest)
        self.joined_at = now

    def start_quarantine(self, now: float) -> None:
        """A heartbeat of the evicted worker has arrived."""
        self._until = now + self.quarantine_seconds

    def is_quarantined(self, now: float) -> bool:
        """Whether the worker may not join yet."""
        return now < self._until
