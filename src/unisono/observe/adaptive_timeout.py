"""A timeout that adapts to the usual time between events."""

from __future__ import annotations

from dataclasses import dataclass, field

_OUTLIER = 2.0  # times `deadline_seconds`


@dataclass
class AdaptiveTimeout:
    """A deadline for the next event, from the mean and deviation of the gaps between earlier events.

    Mean and deviation are estimated as TCP estimates those of round-trip times (RFC 6298, section 2). A single gap
    longer than twice `deadline_seconds` does not change the estimate: the worker was stopped or cut off meanwhile, and
    a longer deadline would delay the detection of the next freeze. A second such gap in a row changes it, since events
    have become slower.

    Args:
        usual_seconds: the expected gap, before any gap was observed; then the estimated mean.
        min_seconds: the shortest deadline.
        deviation_seconds: the estimated deviation; half of `usual_seconds` at first.
        last: the time of the last event; None: there was none.
        replace_first: whether the first observed gap, however long, replaces `usual_seconds` (section 2.2).
    """

    usual_seconds: float
    min_seconds: float = 0.0
    deviation_seconds: float = 0.0
    last: float | None = None
    replace_first: bool = False
    _outlier: bool = field(default=False, init=False)  # whether the last gap was longer than twice the deadline

    def __post_init__(self) -> None:
        self.deviation_seconds = self.usual_seconds / 2

    def record(self, now: float) -> None:
        """Record an event at `now`."""
        if self.last is not None:
            gap = max(0.0, now - self.last)
            before, self._outlier = self._outlier, gap > _OUTLIER * self.deadline_seconds
            if before or self.replace_first or not self._outlier:
                self._learn(gap)
        self.last = now

    def restart(self, now: float) -> None:
        """Measure the next gap from `now`; the time since the last event does not change the estimate."""
        self.last, self._outlier = now, False

    @property
    def deadline_seconds(self) -> float:
        """The time after the last event from which the next event is overdue."""
        return max(self.min_seconds, 2 * self.usual_seconds + 4 * self.deviation_seconds)

    def overdue(self, now: float) -> bool:
        """Whether the deadline has passed."""
        return self.last is not None and now - self.last > self.deadline_seconds

    def _learn(self, gap: float) -> None:
        if self.replace_first:
            self.usual_seconds, self.deviation_seconds, self.replace_first = gap, gap / 2, False
        self.deviation_seconds += (abs(gap - self.usual_seconds) - self.deviation_seconds) / 4
        self.usual_seconds += (gap - self.usual_seconds) / 8
