"""Exponential back-off with an upper bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Backoff:
    """Pauses that grow from attempt to attempt up to a bound.

    Args:
        first_seconds: pause before attempt 0, greater than 0.
        factor: ratio of each pause to the previous one, greater than 1.
        longest_seconds: upper bound of every pause.
    """

    first_seconds: float
    factor: float
    longest_seconds: float

    def seconds(self, attempt: int) -> float:
        """The pause before attempt number `attempt`, which counts from 0 and may be arbitrarily large."""
        # The exponent is bounded, because the power of a large one would overflow.
        return min(self.first_seconds * self.factor ** min(attempt, self._growing_attempts), self.longest_seconds)

    @cached_property
    def _growing_attempts(self) -> int:
        return math.ceil(math.log(self.longest_seconds / self.first_seconds) / math.log(self.factor))
