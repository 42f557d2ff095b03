"""How long to wait for what usually comes every so often: nobody guesses a timeout."""

from __future__ import annotations

from dataclasses import dataclass, field

_OUTLIER = 2.0  # deadlines


@dataclass
class AdaptiveTimeout:
    """Mean and deviation of the gaps between events, as TCP keeps them of round trips (RFC 6298, section 2).

    A single outlier, a gap of more than two deadlines, says nothing about the rhythm: the worker was stopped or cut off
    meanwhile. It is not learned, or the next freeze would be noticed later than this one. A second one in a row is: the
    rhythm has become slower.

    Args:
        usual_seconds: the gap expected before any was seen.
        least_seconds: the shortest deadline.
        guessed: the first gap that is seen takes the place of `usual_seconds` (section 2.2).
    """

    usual_seconds: float
    least_seconds: float = 0.0
    deviation_seconds: float = 0.0
    last: float | None = None
    guessed: bool = False
    _outlier: bool = field(default=False, init=False)  # the latest gap was one

    def __post_init__(self) -> None:
        self.deviation_seconds = self.usual_seconds / 2

    def beat(self, now: float) -> None:
        """It came at `now`."""
        if self.last is not None:
            gap = max(0.0, now - self.last)
            before, self._outlier = self._outlier, gap > _OUTLIER * self.deadline_seconds
            if before or self.guessed or not self._outlier:
                self._learn(gap)
        self.last = now

    def restart(self, now: float) -> None:
        """Wait from `now`; the time since the last one says nothing."""
        self.last, self._outlier = now, False

    @property
    def deadline_seconds(self) -> float:
        """After the last one, when the next is overdue."""
        return max(self.least_seconds, 2 * self.usual_seconds + 4 * self.deviation_seconds)

    def overdue(self, now: float) -> bool:
        """Whether the next should have come by now."""
        return self.last is not None and now - self.last > self.deadline_seconds

    def _learn(self, gap: float) -> None:
        if self.guessed:
            self.usual_seconds, self.deviation_seconds, self.guessed = gap, gap / 2, False
        self.deviation_seconds += (abs(gap - self.usual_seconds) - self.deviation_seconds) / 4
        self.usual_seconds += (gap - self.usual_seconds) / 8
