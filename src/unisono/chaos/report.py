"""Shows a trial as tables in a terminal, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from unisono.chaos.trial import Trial

_DIGEST = 64  # characters


def show(trial: Trial, console: Console) -> None:
    """Print the injected faults and the comparison."""
    faults = Table("second", "step", "fault", box=box.SIMPLE_HEAD, pad_edge=False)
    for each in trial.injected:
        faults.add_row(f"{each.at_seconds:.2f}", f"{each.step:,}", each.words)
    console.print(faults)
    if trial.rows:
        compared = Table("", "without faults", "with faults", "", box=box.SIMPLE_HEAD, pad_edge=False)
        for row in trial.rows:
            compared.add_row(row.name, _short(row.baseline), _short(row.faulty), "no" if row.differs else "equal")
        console.print(compared)


def _short(text: str) -> str:
    """The first characters of `text` if it is a digest; other text unchanged."""
    return f"{text[:16]}…" if len(text) == _DIGEST else text


def trial_mapping(trial: Trial) -> dict[str, Any]:
    """A trial as a JSON object."""
    faults = [{**asdict(each), "kind": each.kind.value, "moment": each.moment.value} for each in trial.injected]
    rows = [{"name": row.name, "undisturbed": row.baseline, "disturbed": row.faulty, "differs": row.differs}
            for row in trial.rows]  # fmt: skip
    return {"seed": trial.schedule.seed, "equal": not trial.differences, "differences": trial.differences,
            "happened": faults, "compared": rows}  # fmt: skip
