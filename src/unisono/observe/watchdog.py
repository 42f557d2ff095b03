"""A worker without a coordinator watches itself: its own log says when a step takes too long, and why."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection

from unisono.observe.activity import Activity, Phase
from unisono.observe.activity_tracker import ThreadTracker
from unisono.observe.adaptive_timeout import AdaptiveTimeout
from unisono.observe.stall_diagnosis import Stall, own_stall
from unisono.observe.time_ledger import STEP_PHASES

LATE_SECONDS = 1.0  # time after a step's deadline from which a stall is reported
_CHECK_SECONDS = 0.25
_FIRST_SECONDS = 2.5  # expected time of a step before any was observed; the first includes work that is done once
LOG = logging.getLogger("unisono")


class StallDetector:
    """Decides when to report a stall of a worker's steps. Has no clock.

    Args:
        now: the current time, in seconds.
        watched: phases in which a step may stall; time in other phases does not count.
    """

    def __init__(self, now: float, watched: Collection[Phase] = STEP_PHASES) -> None:
        self._watched = watched
        self._timeout = AdaptiveTimeout(_FIRST_SECONDS, last=now)
        self._steps: int | None = None
        self._again_at = 0.0

    def check(self, steps: int, activity: Activity, now: float) -> str:
        """A sentence about the stall; empty if there is none to report.

        While a stall lasts, it is reported again whenever its time has doubled.

        Args:
            steps: the number of committed steps.
        """
        counts = activity.is_waiting or activity.phase in self._watched
        if steps != self._steps or not counts:
            if self._steps is None or not counts:
                self._timeout.restart(now)
            else:
                self._timeout.record(now)
            self._steps, self._again_at = steps, 0.0
            return ""
        assert self._timeout.last is not None  # since the first check
        seconds = now - self._timeout.last
        if seconds < self._timeout.deadline_seconds + LATE_SECONDS or now < self._again_at:
            return ""
        self._again_at = now + seconds
        return own_stall(Stall(steps, seconds, self._timeout.usual_seconds), activity)


class Watchdog:
    """A thread that checks a worker until the watchdog is closed, or the worker's tracker is garbage.

    Args:
        watched: see `StallDetector`.
        report: called with a sentence about each stall.
    """

    def __init__(
        self, tracker: ThreadTracker, watched: Collection[Phase] = STEP_PHASES,
        report: Callable[[str], None] = LOG.warning,
    ) -> None:  # fmt: skip
        self._closed = threading.Event()
        arguments = weakref.ref(tracker), StallDetector(time.monotonic(), watched), report, self._closed
        self._thread = threading.Thread(target=_watch, args=arguments, name="unisono watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()


def _watch(
    tracker_ref: weakref.ref[ThreadTracker], detector: StallDetector, report: Callable[[str], None],
    closed: threading.Event,
) -> None:  # fmt: skip
    while not closed.wait(_CHECK_SECONDS) and (tracker := tracker_ref()) is not None:
        text = detector.check(tracker.steps, tracker.activity(), time.monotonic())
        if text:
            report(text)
        del tracker  # otherwise it would exist as long as this thread
