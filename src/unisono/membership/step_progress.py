"""The steps that members of a view report, and when the next step is due."""

from __future__ import annotations

from collections.abc import Callable

from unisono.membership.protocol import StateVersion, StepCount, View
from unisono.observe.adaptive_timeout import AdaptiveTimeout


class StepProgress:
    """The progress of the latest view. All members take a step together, so one member's report counts for all.

    Args:
        now: the time, in seconds.

    Attributes:
        timeout: when the next step is due.
    """

    def __init__(self, now: float) -> None:
        self.timeout = AdaptiveTimeout(1.0, last=now, replace_first=True)
        self._furthest = (0, 0)  # view and step
        self._start_known = False  # the step that the view started from
        self._started = False  # a step was taken in the view
        self._disturbed = False  # a heartbeat was overdue during the current step
        self._taken = 0

    @property
    def count(self) -> StepCount:
        """Steps taken, as far as members have reported."""
        return StepCount(self._taken, self._furthest[1])

    def start_view(self, view: View, now: float) -> None:
        """Note that `view` starts. If it starts from a checkpoint, its first report says from which step."""
        self._furthest, self._start_known = (view.number, view.start.step), view.start.view > 0
        self._started = False
        self.timeout.restart(now)

    def disturb(self) -> None:
        """Note that the current step takes longer because a member is frozen; the timeout does not adapt to it."""
        self._disturbed = True

    def report(self, version: StateVersion, now: float, is_disturbed: Callable[[], bool]) -> None:
        """Process a member's report that it has the state `version`.

        Args:
            is_disturbed: returns whether a member's heartbeat is overdue; called only if the step is overdue.
        """
        reached = version.view, version.step
        if not self._start_known:
            self._start_known, self._furthest = True, reached
        elif reached > self._furthest:
            self._taken += version.step - self._furthest[1]
            self._furthest = reached
            disturbed = self._disturbed or (self.timeout.overdue(now) and is_disturbed())
            if self._started and not disturbed:
                self.timeout.record(now)
            else:  # the first step includes rendezvous and state transfer
                self.timeout.restart(now)
            self._started, self._disturbed = True, False
