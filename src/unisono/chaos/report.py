"""A trial for people, as tables, and for files."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from unisono.chaos.trial import Trial

_DIGEST = 64  # letters


def show(trial: Trial, console: Console) -> None:
    """What befell the run, and what was compared."""
    happened = Table("second", "step", "what befell it", box=box.SIMPLE_HEAD, pad_edge=False)
    for each in trial.injected:
        happened.add_row(f"{each.at_seconds:.2f}", f"{each.step:,}", each.words)
    console.print(happened)
    if trial.rows:
        compared = Table("", "undisturbed", "with faults", "", box=box.SIMPLE_HEAD, pad_edge=False)
        for row in trial.rows:
            compared.add_row(row.name, _short(row.baseline), _short(row.faulty), "no" if row.differs else "equal")
        console.print(compared)


def _short(text: str) -> str:
    """A digest by its beginning; numbers as they are."""
    return f"{text[:16]}…" if len(text) == _DIGEST else text


def trial_mapping(trial: Trial) -> dict[str, Any]:
    """A trial as JSON can say it."""
    happened = [{**asdict(each), "kind": each.kind.value, "moment": each.moment.value} for each in trial.injected]
    return {"seed": trial.schedule.seed, "equal": not trial.differences, "differences": trial.differences,
            "happened": happened, "compared": [asdict(row) for row in trial.rows]}  # fmt: skip
