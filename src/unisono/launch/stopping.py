"""How a run is asked to stop, and what is raised when it was."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from unisono.errors import UnisonoError


class StopRequest:
    """Whether this process was asked to stop at the next step boundary."""

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> StopRequest:
        """From now on SIGTERM to this process is such a request. Only the main thread may call it."""

        def ask(number: int, frame: Any) -> None:
            self.requested = True

        signal.signal(signal.SIGTERM, ask)
        return self


class Interrupted(UnisonoError):
    """The launcher was asked to end the run before it had finished (Ctrl-C, SIGTERM, a closed terminal).

    Args:
        number: of the signal.
        results: what the workers returned, by rank, if all came to a step boundary and returned; else empty.
    """

    def __init__(self, number: int, results: Sequence[Any] = ()) -> None:
        self.number, self.results = number, tuple(results)
        super().__init__(f"interrupted by {signal.Signals(number).name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.number, self.results)

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process ended by this signal: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.number
