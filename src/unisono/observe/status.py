"""How a run stands, as lines of text: who is here, what each does, where the time went, and what was said of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.doing import Doing, Phase
from unisono.observe.goodput import advice, in_a_line, table
from unisono.observe.words import duration

_LATEST = 5  # of what happened and was said


def under_way(status: Mapping[str, Any]) -> list[str]:
    """Of a run whose coordinator answered `status`, see `StatusMessage`."""
    view = status["view"]
    present = {name: rank for rank, name in enumerate(view["members"])}
    over = "goes on" if status["over"] == "no" else f"ends {status['over']}"
    lines = [f"view {view['number']}: {len(present)} workers; it {over}", ""]
    lines += _aligned(
        [["worker", "rank", "step", "does", "heard of"], *(_row(each, present) for each in status["workers"])]
    )
    lines += _spent({name: spent for name, spent in status["spent"].items() if spent})
    lines += _latest("said", status["says"])
    stamps = [
        (time.strftime("%H:%M:%S", time.localtime(each["at_seconds"])), each["words"]) for each in status["happened"]
    ]
    return lines + _latest("happened", [f"{at} {words}" for at, words in stamps])


def ended(result: Mapping[str, Any]) -> list[str]:
    """Of a run that is over, from its summary."""
    ledger = result.get("ledger") or []
    return [
        f"over after {result['steps']:,} steps and {duration(result['wall_seconds'])}",
        *_spent({str(rank): spent for rank, spent in enumerate(ledger)}),
    ]


def _row(worker: Mapping[str, Any], present: Mapping[str, int]) -> list[str]:
    told = worker["doing"]
    does = "nothing said yet"
    if told:
        doing = Doing(Phase(told["phase"]), waits_for=told["waits_for"], line=told["line"])
        does = f"{doing.words} since {duration(told['since_seconds'])}{doing.where}"
    name = worker["worker"]
    ago = f"{duration(worker['silent_seconds'])} ago"
    return [name, str(present.get(name, "–")), str(worker["step"]), does, ago]


def _spent(spent: Mapping[str, Mapping[str, float]]) -> list[str]:
    if not spent:
        return []
    ledgers = list(spent.values())
    tip = advice(ledgers)
    found = ["", "seconds of each worker's life", *table(ledgers, list(spent))]
    if line := in_a_line(ledgers):
        found += ["", f"after the start: {line}"]
    return [*found, tip] if tip else found


def _latest(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *lines[-_LATEST:]] if lines else []


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
