"""Runs a compressor's `mean`, which is a coroutine, by polling."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unisono.compress import Mean


class PendingMean:
    """A mean in flight. It is started at once, and makes progress whenever it is polled."""

    def __init__(self, steps: Mean) -> None:
        self._steps = steps
        self._result: Tensor | None = None
        self._work: Any = None
        self._advance(None, first=True)

    def poll(self) -> bool:
        """Make progress without blocking, and return whether the mean is complete."""
        while self._result is None and self._work.poll():
            self._advance(self._work.wait())
        return self._result is not None

    def wait(self) -> Tensor:
        """Wait for the mean, and return it. Raises what the communicator raises."""
        while self._result is None:
            self._advance(self._work.wait())
        return self._result

    def _advance(self, value: Any, first: bool = False) -> None:
        try:
            self._work = next(self._steps) if first else self._steps.send(value)
        except StopIteration as stop:
            self._result = stop.value
