"""How a run is asked to stop, and what is raised when it was."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from unisono.errors import UnisonoError

STOP = signal.SIGTERM
STOP_ALL = signal.SIGUSR1  # where SIGTERM asks one worker to leave the others


class StopRequest:
    """What this process was asked to do at the next step boundary: `requested` to stop the run; `leaving` to go, while
    the others go on.

    Args:
        leaves: SIGTERM asks this worker to leave, and SIGUSR1 all to stop; else SIGTERM asks to stop.
    """

    def __init__(self, leaves: bool = False) -> None:
        self.requested = self.leaving = False
        self._leaves = leaves

    def listen(self) -> StopRequest:
        """From now on the signals are such requests. Only the main thread may call it."""

        def stop(number: int, frame: Any) -> None:
            self.requested = True

        def leave(number: int, frame: Any) -> None:
            self.leaving = True

        signal.signal(STOP_ALL if self._leaves else STOP, stop)
        if self._leaves:
            signal.signal(signal.SIGTERM, leave)
        return self


class Interrupted(UnisonoError):
    """The launcher, or all workers, were asked to end the run before it had finished (Ctrl-C, SIGTERM, a closed
    terminal).

    Args:
        number: of the signal.
        results: what the workers returned, by rank, if all came to a step boundary and returned; else empty.
        words: how far the run came; empty where that is not known.
    """

    def __init__(self, number: int, results: Sequence[Any] = (), words: str = "") -> None:
        self.number, self.results, self.words = number, tuple(results), words
        super().__init__(f"interrupted by {signal.Signals(number).name}" + (f": {words}" if words else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.number, self.results, self.words)

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process ended by this signal: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.number
