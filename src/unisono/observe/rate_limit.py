"""Limits how often something is reported."""

from __future__ import annotations

import time


class RateLimit:
    """Allows at most one report every `interval_seconds`; the first report is always due."""

    def __init__(self, interval_seconds: float) -> None:
        self._interval = interval_seconds
        self._next = float("-inf")

    def due(self) -> bool:
        """Whether a report is due; if so, the next is due an interval from now."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._interval
        return True
