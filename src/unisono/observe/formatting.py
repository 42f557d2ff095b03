"""Numbers and results as text for people."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.filesize import decimal

from unisono.observe.goodput import advice, shares_text


def number(value: float) -> str:
    """A number with four significant digits, or more before the point: 0.01234, 12.34, 12,345."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def rate(per_second: float) -> str:
    """A rate with three significant digits, or more before the point, as it changes all the time."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def duration(seconds: float) -> str:
    """A duration with its unit: 12.3 ms, 9.8 s, 4 min 05 s, 3 h 20 min."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def clock(seconds: float) -> str:
    """A duration as a clock shows it: 0:07, 12:40, 1:02:03."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def metrics_text(values: Mapping[str, float]) -> str:
    """Metrics as text: ``accuracy 0.9861  held-out loss 0.043``."""
    return "  ".join(f"{label(name)} {number(value)}" for name, value in values.items())


def label(metric: str) -> str:
    """A metric's name as text; the loss on held-out data must not be mistaken for the training loss."""
    return "held-out loss" if metric == "loss" else metric.replace("_", " ")


def result_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows of a run's result, each a label and a text; see `unisono.Result` for its fields."""
    median = result["step_seconds_median"]
    typical = f" · {duration(median)} a step" if median else ""
    rows = [("training loss", number(result["loss"]))]
    rows += [(label(name), number(value)) for name, value in result["metrics"].items()]
    rows += [
        ("trained", f"{result['steps']:,} steps, {result['samples']:,} samples{_dropped(result)}"),
        ("speed", f"{rate(result['samples_per_second'])} samples/s{typical}"),
        (
            "time",
            f"{duration(result['wall_seconds'])}, of which {duration(result['startup_seconds'])} to start",
        ),
        ("sent", f"{decimal(int(result['bytes_sent_per_worker']))} by each worker"),
        *_time_spent(result.get("ledger") or ()),
        ("memory", f"{decimal(int(result['peak_rss_bytes']))} at most in a worker"),
        ("weights", result["weights_sha256"]),
    ]
    return [*rows, ("run", str(result["run"]))]


def _time_spent(ledger: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Where the workers' time went, and advice."""
    shares = shares_text(ledger)
    tip = advice(ledger)
    return [("goodput", f"{shares} of the time after the start" + (f": {tip}" if tip else ""))] if shares else []


def _dropped(result: Mapping[str, Any]) -> str:
    """Skipped steps and healed replicas, if any."""
    skipped, healed = result.get("skipped_steps", 0), result.get("healed", 0)
    dropped = f"; {skipped:,} bad step{'s' * (skipped != 1)} dropped" if skipped else ""
    return dropped + (f"; {healed:,} damaged replica{'s' * (healed != 1)} healed" if healed else "")


def resume_command(run: str, steps: int | None = None) -> str:
    """The command that continues the run in the directory `run`, up to `steps` if given."""
    path = shlex.quote(run)
    longer = f" --steps {steps}" if steps is not None else ""
    return f"unisono train --run-dir {path} --resume{longer}"
