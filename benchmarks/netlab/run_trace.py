"""The training time after each step of a run, and the results of its evaluations.

The clock counts training alone, without start-up and evaluations. For our runs it is read from ``events.jsonl``, for
peers from the report of ``scripts/text_contestants.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

THINNED_SECONDS = 0.1  # our own steps are written at most that often


@dataclass(frozen=True)
class Mark:
    """After `step` steps: seconds on the clock, and the training loss (a mark) or bits per byte (an evaluation)."""

    step: int
    seconds: float
    value: float


@dataclass(frozen=True)
class Trace:
    """Marks by ascending step; not every step need have one."""

    marks: tuple[Mark, ...]
    evaluations: tuple[Mark, ...]

    def reached(self, target: float) -> Mark | None:
        """The first evaluation at `target` bits per byte or below."""
        return next((mark for mark in self.evaluations if mark.value <= target), None)

    def step_seconds(self, after: int) -> float:
        """The mean from step `after` (or the first one known from there on) to the last.

        Raises:
            ValueError: there are not two such steps.
        """
        known = [mark for mark in self.marks if mark.step >= after]
        if len(known) < 2 or known[-1].step == known[0].step:
            raise ValueError(f"only {len(known)} steps are known from step {after} on")
        return (known[-1].seconds - known[0].seconds) / (known[-1].step - known[0].step)

    def farthest(self, other: Trace) -> float:
        """The largest difference of training losses over the steps that both know; infinite if there is none."""
        theirs = {mark.step: mark.value for mark in other.marks}
        return max((abs(m.value - theirs[m.step]) for m in self.marks if m.step in theirs), default=float("inf"))


def of_peer(report: Mapping[str, Any]) -> Trace:
    """From the report of ``scripts/text_contestants.py``."""
    return Trace(*(tuple(Mark(*row) for row in report[name]) for name in ("marks", "evaluations")))


def of_run(directory: Path) -> Trace:
    """From the events of one of our runs, finished or not; empty before it has begun."""
    try:
        lines = (directory / "events.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return Trace((), ())
    return of_events(json.loads(line) for line in lines if line.endswith("\n"))


def of_events(events: Iterable[Mapping[str, Any]]) -> Trace:
    """The clock, put together from the times at which steps were written.

    Between two steps that were written, all time is training, unless there was an evaluation: it begins after its
    step, which may have been left out of the record, as it came within `THINNED_SECONDS` of the one before. What is
    left out so is counted by the last step's duration, and is at most those seconds.
    """
    marks: list[Mark] = []
    evaluations: list[Mark] = []
    clock, step, since, each = 0.0, 0, 0.0, 0.0
    for event in events:
        if event["event"] == "step" and event["step"] > step:
            each = float(event["step_seconds"])
            clock += event["time"] - since if since else each
            step, since = event["step"], event["time"]
            marks.append(Mark(step, clock, float(event["loss"])))
        elif event["event"] == "metrics":
            clock += min(THINNED_SECONDS, (event["step"] - step) * each)
            step, since = event["step"], event["time"]
            evaluations.append(Mark(step, clock, float(event["bits_per_byte"])))
    return Trace(tuple(marks), tuple(evaluations))
