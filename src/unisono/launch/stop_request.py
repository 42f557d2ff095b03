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
        leaves: SIGTERM asks this worker to leave, and SIGUSR1 all to stop; else SIGTERM, SIGHUP and SIGINT ask to stop,
            unless they are ignored. A second SIGINT does what it did before `listen`.
    """

    def __init__(self, leaves: bool = False) -> None:
        self.requested = self.leaving = False
        asks = {STOP_ALL: self._stop, signal.SIGTERM: self._leave}
        self._asks = asks if leaves else dict.fromkeys((STOP, signal.SIGHUP, signal.SIGINT), self._stop)
        self._former: dict[int, Any] = {}

    def listen(self) -> StopRequest:
        """From now on the signals are such requests. Only the main thread may call it."""
        for number, ask in self._asks.items():
            former = signal.getsignal(number)
            if former not in (signal.SIG_IGN, ask):
                self._former[number] = former or signal.SIG_DFL  # None: it was not set by Python
                signal.signal(number, ask)
        return self

    def close(self) -> None:
        """From now on the signals do what they did before. Only the main thread may call it."""
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former.clear()

    def _stop(self, number: int, frame: Any) -> None:
        self.requested = True
        if number == signal.SIGINT:
            signal.signal(number, self._former.get(number, signal.default_int_handler))

    def _leave(self, number: int, frame: Any) -> None:
        self.leaving = True


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
