"""Drive a compressor's `mean`, which is written as if it blocked, by polling."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unisono.compress import Mean


class PendingMean:
    """A mean under way: started at once, goes on whenever it is polled."""

    def __init__(self, steps: Mean) -> None:
        self._steps = steps
        self._result: Tensor | None = None
        self._work: Any = None
        self._go_on(None, first=True)

    def poll(self) -> bool:
        """Go on as far as possible without waiting; True when the mean is there."""
        while self._result is None and self._work.poll():
            self._go_on(self._work.wait())
        return self._result is not None

    def wait(self) -> Tensor:
        """The mean. Raises what the communicator raises."""
        while self._result is None:
            self._go_on(self._work.wait())
        return self._result

    def _go_on(self, value: Any, first: bool = False) -> None:
        try:
            self._work = next(self._steps) if first else self._steps.send(value)
        except StopIteration as stop:
            self._result = stop.value
