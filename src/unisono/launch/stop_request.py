"""Requests to stop a run, and the error that is raised when a run was stopped."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from unisono.errors import UnisonoError

STOP = signal.SIGTERM
STOP_ALL = signal.SIGUSR1  # in an elastic run, where SIGTERM asks one worker to leave


class StopRequest:
    """What signals have asked this process to do at the next step boundary.

    Args:
        leaves: whether this worker can leave. If so, SIGTERM asks it to leave, and SIGUSR1 asks all workers to stop.
            Otherwise SIGTERM, SIGHUP and SIGINT ask to stop, unless they are ignored. A second SIGINT then has the
            effect that it had before `listen`.

    Attributes:
        requested: whether all workers are to stop.
        leaving: whether this worker is to leave, while the others continue.
    """

    def __init__(self, leaves: bool = False) -> None:
        self.requested = self.leaving = False
        elastic = {STOP_ALL: self._stop, signal.SIGTERM: self._leave}
        self._handlers = elastic if leaves else dict.fromkeys((STOP, signal.SIGHUP, signal.SIGINT), self._stop)
        self._previous: dict[int, Any] = {}

    def listen(self) -> StopRequest:
        """Install the signal handlers; main thread only."""
        for number, handler in self._handlers.items():
            previous = signal.getsignal(number)
            if previous not in (signal.SIG_IGN, handler):
                self._previous[number] = previous or signal.SIG_DFL  # None: the handler was not set by Python
                signal.signal(number, handler)
        return self

    def close(self) -> None:
        """Restore the previous signal handlers; main thread only."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous.clear()

    def _stop(self, number: int, frame: Any) -> None:
        self.requested = True
        if number == signal.SIGINT:
            signal.signal(number, self._previous.get(number, signal.default_int_handler))

    def _leave(self, number: int, frame: Any) -> None:
        self.leaving = True


class Interrupted(UnisonoError):
    """The run was asked to stop before it was complete, by Ctrl-C, SIGTERM or a closed terminal.

    Args:
        number: the number of the signal.
        results: results of the workers by rank, if all of them stopped at a step boundary; otherwise empty.
        words: the progress of the run as text; empty if it is not known.
    """

    def __init__(self, number: int, results: Sequence[Any] = (), words: str = "") -> None:
        self.number, self.results, self.words = number, tuple(results), words
        super().__init__(f"interrupted by {signal.Signals(number).name}" + (f": {words}" if words else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.number, self.results, self.words)

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect after this signal: 130 for SIGINT (Ctrl-C), 143 for SIGTERM."""
        return 128 + self.number
