"""How long to wait for what usually comes every so often: nobody guesses a timeout."""

from __future__ import annotations

from dataclasses import dataclass

_FORGIVEN = 1.5  # times the longest silence that was wrongly taken for an end
_MOST_FORGIVEN_SECONDS = 10.0
_HALF_FORGOTTEN_SECONDS = 60.0


@dataclass
class Pulse:
    """Mean and deviation of the gaps between events, as TCP keeps them of round trips (RFC 6298, section 2).

    Args:
        usual_seconds: the gap expected before any was seen.
        least_seconds: the shortest deadline.
        forgiven_seconds: the shortest deadline while a false alarm is remembered, see `forgive`.
        guessed: the first gap that is seen takes the place of `usual_seconds` (section 2.2).
    """

    usual_seconds: float
    least_seconds: float = 0.0
    deviation_seconds: float = 0.0
    last: float | None = None
    forgiven_seconds: float = 0.0
    guessed: bool = False

    def __post_init__(self) -> None:
        self.deviation_seconds = self.usual_seconds / 2

    def beat(self, now: float) -> None:
        """It came at `now`."""
        if self.last is not None:
            gap = max(0.0, now - self.last)
            if self.forgiven_seconds:
                self._remember(gap)
            if self.guessed:
                self.usual_seconds, self.deviation_seconds, self.guessed = gap, gap / 2, False
            self.deviation_seconds += (abs(gap - self.usual_seconds) - self.deviation_seconds) / 4
            self.usual_seconds += (gap - self.usual_seconds) / 8
        self.last = now

    def restart(self, now: float) -> None:
        """Wait from `now`; the time since the last one says nothing."""
        self.last = now

    def forgive(self, now: float) -> None:
        """What was taken for lost comes at `now`: from here on a silence as long is waited for, so that who is held up
        again and again is not taken for lost each time. This is forgotten by half in a minute."""
        if self.last is not None:
            self._forgiven(now - self.last)

    @property
    def deadline_seconds(self) -> float:
        """After the last one, when the next is overdue."""
        return max(self._usual_deadline_seconds, self.forgiven_seconds)

    def overdue(self, now: float) -> bool:
        """Whether the next should have come by now."""
        return self.last is not None and now - self.last > self.deadline_seconds

    @property
    def _usual_deadline_seconds(self) -> float:
        return max(self.least_seconds, 2 * self.usual_seconds + 4 * self.deviation_seconds)

    def _remember(self, gap: float) -> None:
        self.forgiven_seconds *= 0.5 ** (gap / _HALF_FORGOTTEN_SECONDS)
        if gap > self._usual_deadline_seconds:
            self._forgiven(gap)

    def _forgiven(self, gap: float) -> None:
        self.forgiven_seconds = max(self.forgiven_seconds, _FORGIVEN * min(gap, _MOST_FORGIVEN_SECONDS))
