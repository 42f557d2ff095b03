"""How long to pause before the next attempt: exponential back-off with an upper bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Backoff:
    """Pauses that grow from attempt to attempt up to a bound.

    Args:
        first_seconds: before attempt 0, greater than 0.
        factor: by which each pause is longer than the one before it, greater than 1.
        longest_seconds: no pause is longer.
    """

    first_seconds: float
    factor: float
    longest_seconds: float

    def seconds(self, attempt: int) -> float:
        """The pause before `attempt` (0, 1, ...), which may be any number however large."""
        # A power with an unbounded exponent would overflow.
        return min(self.first_seconds * self.factor ** min(attempt, self._attempts_that_grow), self.longest_seconds)

    @cached_property
    def _attempts_that_grow(self) -> int:
        return math.ceil(math.log(self.longest_seconds / self.first_seconds) / math.log(self.factor))
