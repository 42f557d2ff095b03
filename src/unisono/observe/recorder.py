"""What a run leaves behind: events and scalars, by one protocol with a real end and an empty one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from unisono.observe.event_log import Events
from unisono.observe.rate_limit import RateLimit
from unisono.observe.sinks import Sink, sinks

STEP_SECONDS = 0.1

Fields = Mapping[str, Any]


class Recorder(Protocol):
    """Takes what happened; never waits for anything and never raises."""

    def event(self, event: str, /, **fields: Any) -> None:
        """Something that happens seldom; it is written at once."""

    def step(self, step: int, steps: int, fields: Callable[[], Fields]) -> None:
        """Step number `step` (from 1) of `steps` is done.

        All but the first and the last are thinned by time: `fields` is called now, in `close`, or never.
        """

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """What an evaluation after `step` steps gave."""

    def close(self) -> None:
        """Write the last step that is still held back, and close what is open."""


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
    """Records into a run directory, and into every sink that is installed.

    Args:
        directory: the run's directory.
        more: sinks; default: all that are installed.
        step_seconds: time between two steps that are written.
    """

    def __init__(self, directory: Path, more: Sequence[Sink] | None = None, step_seconds: float = STEP_SECONDS) -> None:
        self._events = Events(directory)
        self._sinks = sinks(directory) if more is None else list(more)
        self._pace = RateLimit(step_seconds)
        self._held: tuple[int, int, Callable[[], Fields]] | None = None

    def event(self, event: str, /, **fields: Any) -> None:
        """See `Recorder`."""
        self._events.write(event, fields)

    def step(self, step: int, steps: int, fields: Callable[[], Fields]) -> None:
        """See `Recorder`."""
        self._held = step, steps, fields
        if self._pace.due() or step == steps:
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
        if self._held is None:
            return
        (step, steps, fields), self._held = self._held, None
        said = fields()
        self._events.write("step", {"step": step, "steps": steps, **said})
        self._scalars("train", step, said)

    def _scalars(self, group: str, step: int, values: Fields) -> None:
        numbers = {f"{group}/{name}": float(v) for name, v in values.items() if isinstance(v, int | float)}
        for sink in self._sinks:
            sink.scalars(step, numbers)
