"""Forecasts side by side, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from unisono.observe.formatting import duration, label, number, rate
from unisono.plan.simulation import Forecast
from unisono.plan.text_chart import mark

_NARROWEST = 19  # columns of a variant, with its separator
_LABELS = 21


def tables(forecasts: Mapping[str, Forecast], width: int) -> list[Table]:
    """Tables with one column per variant, as many as needed to stay within `width` characters."""
    side_by_side = max(1, (width - _LABELS) // _NARROWEST)
    numbered = [(mark(i), name, forecast) for i, (name, forecast) in enumerate(forecasts.items())]
    return [_table(numbered[i : i + side_by_side]) for i in range(0, len(numbered), side_by_side)]


def _table(variants: list[tuple[Text, str, Forecast]]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    made.add_column("", style="dim", no_wrap=True)
    for sign, name, _ in variants:
        heading = Text.assemble(sign, " ", name.replace(" + ", "\n+ "))
        made.add_column(heading, justify="right", min_width=_NARROWEST - 3, overflow="fold")
    columns = [_figures(forecast) for _, _, forecast in variants]
    for title in columns[0]:
        made.add_row(title, *(column.get(title, "") for column in columns))
    return made


def _figures(it: Forecast) -> dict[str, str]:
    low, high = duration(it.step_seconds_low), duration(it.step_seconds_high)
    figures = {
        "steps/s": rate(it.steps_per_second),
        "median step": duration(it.step_seconds_median),
        "eight of ten steps": _range(low, high),
        "waiting": f"{it.waiting:.0%}",
        "sent by each worker": decimal(it.bytes_per_worker),
        "per step": decimal(round(it.points[-1].bytes / it.steps)),
        f"all {it.steps:,} steps": duration(it.seconds),
        "training loss": number(it.loss),
    }
    return figures | {label(name): number(value) for name, value in it.metrics.items()}


def _range(low: str, high: str) -> str:
    """``640–680 ms``: a common unit is written once."""
    if low == high:
        return low
    first, unit = low.rsplit(" ", 1)
    return f"{first}–{high}" if high.endswith(f" {unit}") and " " not in first else f"{low}–{high}"
