"""How long to wait for what usually comes every so often: nobody guesses a timeout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Pulse:
    """Mean and deviation of the gaps between events, as TCP keeps them of round trips (RFC 6298, section 2).

    Args:
        usual_seconds: the gap expected before any was seen.
        least_seconds: the shortest deadline.
    """

    usual_seconds: float
    least_seconds: float = 0.0
    deviation_seconds: float = 0.0
    last: float | None = None

    def __post_init__(self) -> None:
        self.deviation_seconds = self.usual_seconds / 2

    def beat(self, now: float) -> None:
        """It came at `now`."""
        if self.last is not None:
            gap = max(0.0, now - self.last)
            self.deviation_seconds += (abs(gap - self.usual_seconds) - self.deviation_seconds) / 4
            self.usual_seconds += (gap - self.usual_seconds) / 8
        self.last = now

    def restart(self, now: float) -> None:
        """Wait from `now`; the time since the last one says nothing."""
        self.last = now

    @property
    def deadline_seconds(self) -> float:
        """After the last one, when the next is overdue."""
        return max(self.least_seconds, 2 * self.usual_seconds + 4 * self.deviation_seconds)

    def overdue(self, now: float) -> bool:
        """Whether the next should have come by now."""
        return self.last is not None and now - self.last > self.deadline_seconds
