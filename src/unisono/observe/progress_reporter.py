"""A recorder that also reports progress to the launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unisono.observe.rate_limit import RateLimit
from unisono.observe.recorder import Fields, Recorder

REPORT_SECONDS = 0.1


class ProgressReporter:
    """Passes everything on to `recorder`, and progress and notices to `report`, at a limited rate.

    Args:
        report: takes messages of ``kind`` progress and notice, as the display reads them.
    """

    def __init__(self, recorder: Recorder, report: Callable[[Mapping[str, Any]], None]) -> None:
        self._recorder, self._report = recorder, report
        self._rate_limit = RateLimit(REPORT_SECONDS)
        self._metrics: dict[str, float] = {}

    def event(self, event: str, /, **fields: Any) -> None:
        """See `Recorder`; a field ``words`` is text for people, and is also reported as a notice."""
        self._recorder.event(event, **fields)
        if "words" in fields:
            self._report({"kind": "notice", "text": fields["words"]})

    def step(self, step: int, steps: int, fields: Callable[[], Fields]) -> None:
        """See `Recorder`."""
        self._recorder.step(step, steps, fields)
        if self._rate_limit.due() or step == steps:
            self._report({"kind": "progress", "step": step, "steps": steps, "metrics": self._metrics, **fields()})

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See `Recorder`."""
        self._recorder.metrics(step, values)
        self._metrics = dict(values)

    def close(self) -> None:
        """See `Recorder`."""
        self._recorder.close()
