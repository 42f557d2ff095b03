"""A worker that looks after itself: where nobody else does, its own log says when a step takes too long, and why."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection

from unisono.observe.activity import Activity, Phase
from unisono.observe.activity_tracker import ThreadTracker
from unisono.observe.adaptive_timeout import AdaptiveTimeout
from unisono.observe.stall_diagnosis import Stall, of_oneself

LATE_SECONDS = 1.0  # beyond a step's deadline
_LOOK_SECONDS = 0.25
_FIRST_SECONDS = 2.5  # that a step is supposed to take before any was seen; what is done once is done in the first
STEP = frozenset({Phase.COMPUTE, Phase.DATA, Phase.COMMUNICATION})
LOG = logging.getLogger("unisono")


class Patience:
    """When something is to be said of a worker's steps. Has no clock.

    Args:
        stuck_in: phases in which a step may be stuck; in others time does not count.
    """

    def __init__(self, now: float, stuck_in: Collection[Phase] = STEP) -> None:
        self._stuck_in = stuck_in
        self._steps = AdaptiveTimeout(_FIRST_SECONDS, last=now)
        self._done: int | None = None
        self._again_at = 0.0

    def look(self, done: int, doing: Activity, now: float) -> str:
        """A sentence, or nothing. What goes on is said again each time it has become twice as long.

        Args:
            done: steps that are in the state.
        """
        counts = doing.waits or doing.phase in self._stuck_in
        if done != self._done or not counts:
            if self._done is None or not counts:
                self._steps.restart(now)
            else:
                self._steps.beat(now)
            self._done, self._again_at = done, 0.0
            return ""
        assert self._steps.last is not None  # since the first look
        seconds = now - self._steps.last
        if seconds < self._steps.deadline_seconds + LATE_SECONDS or now < self._again_at:
            return ""
        self._again_at = now + seconds
        return of_oneself(Stall(done, seconds, self._steps.usual_seconds), doing)


class Watchdog:
    """Looks at a worker until it is closed, or nobody has the `watch` any more.

    Args:
        stuck_in: see `Patience`.
        tell: takes a sentence.
    """

    def __init__(
        self, watch: ThreadTracker, stuck_in: Collection[Phase] = STEP, tell: Callable[[str], None] = LOG.warning
    ) -> None:
        self._over = threading.Event()
        seen = weakref.ref(watch), Patience(time.monotonic(), stuck_in), tell, self._over
        self._thread = threading.Thread(target=_look, args=seen, name="unisono watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody looks any more."""
        self._over.set()
        self._thread.join()


def _look(
    watching: weakref.ref[ThreadTracker], patience: Patience, tell: Callable[[str], None], over: threading.Event
) -> None:
    while not over.wait(_LOOK_SECONDS) and (watch := watching()) is not None:
        found = patience.look(watch.done, watch.doing(), time.monotonic())
        if found:
            tell(found)
        del watch  # else it would live as long as this thread does
