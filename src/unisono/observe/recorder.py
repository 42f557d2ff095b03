"""The record of a run: events and scalars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from unisono.observe.event_log import EventLog
from unisono.observe.rate_limit import RateLimit
from unisono.observe.sinks import Sink, sinks

STEP_SECONDS = 0.1

Fields = Mapping[str, Any]


class Recorder(Protocol):
    """Records events, steps and metrics. Its methods never block and never raise."""

    def event(self, event: str, /, **fields: Any) -> None:
        """Record a rare event; it is written at once."""

    def step(self, step: int, steps: int, fields: Callable[[], Fields]) -> None:
        """Record that step `step` (from 1) of `steps` is taken.

        Steps between the first and the last are recorded at a limited rate: `fields` is called now, in `close`, or
        never.
        """

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record the result of an evaluation after `step` steps."""

    def close(self) -> None:
        """Write the last step if it is not written yet, and close all files."""


class NullRecorder:
    """Records nothing: for workers other than the first."""

    def event(self, event: str, /, **fields: Any) -> None:
        """See `Recorder`."""

    def step(self, step: int, steps: int, fields: Callable[[], Fields]) -> None:
        """See `Recorder`."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See `Recorder`."""

    def close(self) -> None:
        """See `Recorder`."""


class RunRecorder:
    """Records to the run directory, and to all installed sinks.

    Args:
        directory: the run directory.
        more: the sinks; None: all that are installed.
        step_seconds: the least time between two written steps.
    """

    def __init__(self, directory: Path, more: Sequence[Sink] | None = None, step_seconds: float = STEP_SECONDS) -> None:
        self._events = EventLog(directory)
        self._sinks = sinks(directory) if more is None else list(more)
        self._rate_limit = RateLimit(step_seconds)
        self._last_step: tuple[int, int, Callable[[], Fields]] | None = None

    def event(self, event: str, /, **fields: Any) -> None:
        """See `Recorder`."""
        self._events.write(event, fields)

    def step(self, step: int, steps: int, fields: Callable[[], Fields]) -> None:
        """See `Recorder`."""
        self._last_step = step, steps, fields
        if self._rate_limit.due() or step == steps:
            self._write_step()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See `Recorder`."""
        self._events.write("metrics", {"step": step, **values})
        self._scalars("metrics", step, values)

    def close(self) -> None:
        """See `Recorder`."""
        self._write_step()
        self._events.close()
        for sink in self._sinks:
            sink.close()

    def _write_step(self) -> None:
        if self._last_step is None:
            return
        (step, steps, fields), self._last_step = self._last_step, None
        values = fields()
        self._events.write("step", {"step": step, "steps": steps, **values})
        self._scalars("train", step, values)

    def _scalars(self, group: str, step: int, values: Fields) -> None:
        numbers = {f"{group}/{name}": float(v) for name, v in values.items() if isinstance(v, int | float)}
        for sink in self._sinks:
            sink.scalars(step, numbers)
