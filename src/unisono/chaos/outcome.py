"""The outcome of a run, from its directory, and the differences between two runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.observe.event_log import FILE

Losses = dict[int, list[Any]]  # by step from 1: each distinct recorded value


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a finished run.

    Args:
        steps: the number of steps.
        samples: the number of samples used in these steps.
        losses: the recorded losses of each step.
        metrics: the metrics of the last evaluation.
        weights: the SHA-256 of the weights.
        used: by step, how often each sample was used; empty if that was not counted.
        seconds: from the start of the command to the end of the run; 0 if that was not measured.
    """

    steps: int
    samples: int
    losses: Losses
    metrics: Mapping[str, Any]
    weights: str
    used: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Row:
    """One quantity of both runs, compared, as text.

    Args:
        name: the name of the quantity.
        baseline, faulty: its value in the run without faults, and in the run with faults.
        differs: a description of the first difference; empty if there is none.
    """

    name: str
    baseline: str
    faulty: str
    differs: str = ""


def losses(run: Path) -> Losses:
    """All recorded losses of the run in the directory `run`, by step."""
    found: Losses = {}
    for event in _events(run):
        if event["event"] in ("step", "view") and event["step"] > 0:
            values = found.setdefault(event["step"], [])
            if event["loss"] not in values:
                values.append(event["loss"])
    return found


def _events(run: Path) -> Iterator[dict[str, Any]]:
    with (run / FILE).open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def compare(baseline: RunOutcome, faulty: RunOutcome) -> list[Row]:
    """The comparison of both runs, row by row."""
    a, b = baseline, faulty
    return [
        _row("steps", f"{a.steps:,}", f"{b.steps:,}"),
        _row("samples", f"{a.samples:,}", f"{b.samples:,}", _sample_difference(a, b)),
        Row("losses", _count(a.losses), _count(b.losses), _first_difference(a, b)),
        _row("metrics", _metrics_text(a.metrics), _metrics_text(b.metrics)),
        _row("weights", a.weights, b.weights),
    ]


def _row(name: str, a: str, b: str, differs: str = "") -> Row:
    return Row(name, a, b, differs or ("" if a == b else f"{a} without faults, {b} with faults"))


def _metrics_text(metrics: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {value!r}" for name, value in metrics.items()) or "none"


def _count(found: Losses) -> str:
    return f"of {len(found):,} steps"


def _first_difference(a: RunOutcome, b: RunOutcome) -> str:
    """The first step for which the runs have not recorded one loss each, and the same; empty if there is none."""
    for step in range(1, max(a.steps, b.steps) + 1):
        before, now = a.losses.get(step, []), b.losses.get(step, [])
        if before != now or len(now) != 1:
            return f"step {step:,}: {_values(before)} without faults, {_values(now)} with faults"
    return ""


def _values(values: list[Any]) -> str:
    return " and ".join(map(str, values)) or "none"


def _sample_difference(a: RunOutcome, b: RunOutcome) -> str:
    for step in sorted({*a.used, *b.used}):
        before, now = a.used.get(step, {}), b.used.get(step, {})
        if before != now:
            others = sorted(n for n in {*before, *now} if before.get(n, 0) != now.get(n, 0))
            times = f"{before.get(others[0], 0)} times without faults, {now.get(others[0], 0)} times with faults"
            return f"step {step:,} used sample {others[0]}: {times}"
    return ""
