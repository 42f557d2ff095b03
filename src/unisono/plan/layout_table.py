"""Shows the estimate of a layout as tables for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.filesize import decimal
from rich.table import Table

_LABELS, _NARROWEST = 34, 15  # columns of the labels, and of one group of workers
_MEMORY_ROWS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "buffers": "buffers",
    "gathered": "parameters gathered, temporarily",
    "activations": "activations of a micro-batch",
    "in_flight": "activations of all in flight",
    "total": "at once, at most",
}
_WHOLE = " stays whole: "


def heading(task: str, estimate: Mapping[str, Any]) -> str:
    """A sentence with task, layout and batch sizes."""
    workers, replicas, each = estimate["workers"], estimate["replicas"], estimate["micro_batches"]
    samples = _many(estimate["micro_batch"], "sample")
    return (
        f"{task}, {estimate['parameters']:,} parameters, as {estimate['layout']} on {_many(workers, 'worker')}: "
        f"{_many(replicas, 'replica')}, {_many(each, 'micro-batch', 'es')} of {samples} on each worker in a step"
    )


def tables(estimate: Mapping[str, Any], width: int) -> list[Table]:
    """Tables of memory and messages, as many as needed to stay within `width` characters. Workers with equal numbers
    share a column."""
    side_by_side = max(1, (width - _LABELS) // _NARROWEST)
    holdings = estimate["holdings"]
    found = []
    for i in range(0, len(holdings), side_by_side):
        some = holdings[i : i + side_by_side]
        found += [_held(some, estimate["memory"]), *_sent(some)]
    return found


def notes(estimate: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on the total memory, and the notes of the estimate."""
    memory = estimate["memory"]
    if memory["shared"]:
        needed = sum(each["total"] * len(each["workers"]) for each in estimate["holdings"])
        yield (f"All workers together need {decimal(needed)} of the {decimal(memory['bytes'])} of {memory['name']} "
               f"({_share(needed, memory['bytes'])}), besides the memory of each process itself.")  # fmt: skip
    else:
        needed = max(each["total"] for each in estimate["holdings"])
        yield (f"Of the {decimal(memory['bytes'])} of one {memory['name']}, a worker needs up to {decimal(needed)} "
               f"({_share(needed, memory['bytes'])}).")  # fmt: skip
    whole: dict[str, list[str]] = {}
    for note in estimate["notes"]:
        if _WHOLE in note:
            name, _, why = note.partition(_WHOLE)
            whole.setdefault(_starred(why), []).append(_starred(name))
        else:
            about, colon, items = note.partition(": ")
            yield _sentence(f"{about}{colon}{', '.join(dict.fromkeys(map(_starred, items.split(', '))))}")
    for why, names in whole.items():
        yield _sentence(f"whole on each: {', '.join(dict.fromkeys(names))} ({why})")


def _held(holdings: Sequence[Mapping[str, Any]], memory: Mapping[str, Any]) -> Table:
    made = _table(holdings, "each holds")
    for key, label in _MEMORY_ROWS.items():
        if any(each[key] for each in holdings) and (key != "in_flight" or _differ(holdings)):
            style = "bold" if key == "total" else ""
            made.add_row(label, *(decimal(each[key]) for each in holdings), style=style, end_section=key == "in_flight")
    if not memory["shared"]:
        made.add_row(f"of one {memory['name']}", *(_share(each["total"], memory["bytes"]) for each in holdings))
    return made


def _sent(holdings: Sequence[Mapping[str, Any]]) -> list[Table]:
    rows = {(t["axes"], t["kind"]) for each in holdings for t in each["messages"]}
    if not rows:
        return []
    made = _table(holdings, "each sends in a step")
    for axes, kinds in groupby(sorted(rows), key=lambda row: row[0]):
        for _, kind in kinds:
            made.add_row(f"{axes}: {kind}", *(_traffic(each, axes, kind) for each in holdings))
    totals = (sum(t["bytes"] for t in each["messages"]) for each in holdings)
    made.add_row("in all", *map(decimal, totals), style="bold")
    return [made]


def _table(holdings: Sequence[Mapping[str, Any]], about: str) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    made.add_column(about, no_wrap=True, min_width=_LABELS - 2)
    for each in holdings:
        made.add_column(_workers(each["workers"]), justify="right", min_width=_NARROWEST - 3, overflow="fold")
    return made


def _traffic(holding: Mapping[str, Any], axes: str, kind: str) -> str:
    found = [t for t in holding["messages"] if (t["axes"], t["kind"]) == (axes, kind)]
    return f"{found[0]['count']:,} · {decimal(found[0]['bytes'])}" if found else "–"


def _differ(holdings: Sequence[Mapping[str, Any]]) -> bool:
    return any(each["in_flight"] != each["activations"] for each in holdings)


def _workers(ranks: Sequence[int]) -> str:
    """``worker 3``, ``workers 0–3, 8``."""
    runs = []
    for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}–{members[-1]}")
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(runs)}"


def _many(number: int, noun: str, more: str = "s") -> str:
    return f"{number:,} {noun}{more * (number != 1)}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2g}" if part > 10 * whole else f"{part / whole:.0%}" if part > whole / 100 else "under 1%"


def _starred(name: str) -> str:
    """`name` with a star in place of the indices in a list of modules."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
