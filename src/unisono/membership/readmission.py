"""When an evicted worker may join again: quarantines grow, so that a worker that freezes repeatedly costs little."""

from __future__ import annotations

from dataclasses import dataclass, field

_FIRST_SECONDS = 1.0
_PER_MEMBER_SECONDS = 4.0
_LONGEST_SECONDS = 600.0


@dataclass
class Readmission:
    """The quarantines of one worker after evictions.

    After the first eviction there is no quarantine, after the second one of a second. The quarantine doubles with each
    further eviction in a row. An eviction costs every member about a second, so a worker that has trained for four
    seconds per member has compensated for it: that ends the row. For the same reason no quarantine is longer than four
    seconds per member. Both times are at most 600 s.

    Args:
        joined_at: when the worker joined the view.

    Attributes:
        quarantine_seconds: the quarantine after the latest eviction.
    """

    joined_at: float
    quarantine_seconds: float = field(default=0.0, init=False)
    _next_seconds: float = field(default=0.0, init=False)
    _until: float = field(default=float("-inf"), init=False)

    def join(self, now: float) -> None:
        """Note that the worker joins a view."""
        self.joined_at = now

    def evict(self, members: int, now: float) -> None:
        """Note that the worker is evicted from a view of `members` workers."""
        longest = min(_PER_MEMBER_SECONDS * members, _LONGEST_SECONDS)
        if now - self.joined_at >= longest:
            self._next_seconds = 0.0
        self.quarantine_seconds = self._next_seconds
        self._next_seconds = min(max(_FIRST_SECONDS, 2 * self.quarantine_seconds), longest)
        self.joined_at = now

    def start_quarantine(self, now: float) -> None:
        """Start the quarantine of the evicted worker, as its first heartbeat since the eviction has arrived."""
        self._until = now + self.quarantine_seconds

    def is_quarantined(self, now: float) -> bool:
        """Whether the worker may not join yet."""
        return now < self._until
