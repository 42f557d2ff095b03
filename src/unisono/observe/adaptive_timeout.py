"""A timeout that adapts to the usual time between events."""

from __future__ import annotations

from dataclasses import dataclass, field

_OUTLIER = 2.0  # deadlines


@dataclass
class AdaptiveTimeout:
    """Mean and deviation of the gaps between events, as TCP keeps them of round trips (RFC 6298, section 2).

    A single outlier, a gap of more than two deadlines, is not learned: the worker was stopped or cut off meanwhile, and
    learning it would delay the detection of the next freeze. A second one in a row is learned: events have become
    slower.

    Args:
        usual_seconds: the expected gap before any was observed.
        min_seconds: the shortest deadline.
        last: time of the last event; None: there was none.
        replace_first: the first observed gap replaces `usual_seconds` (section 2.2).
    """

    usual_seconds: float
    min_seconds: float = 0.0
    deviation_seconds: float = 0.0
    last: float | None = None
    replace_first: bool = False
    _outlier: bool = field(default=False, init=False)  # the last gap was one

    def __post_init__(self) -> None:
        self.deviation_seconds = self.usual_seconds / 2

    def record(self, now: float) -> None:
        """An event happened at `now`."""
        if self.last is not None:
            gap = max(0.0, now - self.last)
            before, self._outlier = self._outlier, gap > _OUTLIER * self.deadline_seconds
            if before or self.replace_first or not self._outlier:
                self._learn(gap)
        self.last = now

    def restart(self, now: float) -> None:
        """Count from `now`, and do not learn from the time since the last event."""
        self.last, self._outlier = now, False

    @property
    def deadline_seconds(self) -> float:
        """The time after the last event when the next is overdue."""
        return max(self.min_seconds, 2 * self.usual_seconds + 4 * self.deviation_seconds)

    def overdue(self, now: float) -> bool:
        """Whether the deadline has passed."""
        return self.last is not None and now - self.last > self.deadline_seconds

    def _learn(self, gap: float) -> None:
        if self.replace_first:
            self.usual_seconds, self.deviation_seconds, self.replace_first = gap, gap / 2, False
        self.deviation_seconds += (abs(gap - self.usual_seconds) - self.deviation_seconds) / 4
        self.usual_seconds += (gap - self.usual_seconds) / 8
