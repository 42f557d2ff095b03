"""Estimates of a layout are exact: bytes to the byte, messages one by one."""

from __future__ import annotations

import io
import resource
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from tests.campaigns.layout_memory import CASES, compare
from tests.support import processes
from tests.support.training_runs import Noisy, source
from unisono import Task
from unisono.plan import layout_table as laid_table
from unisono.plan.layout_estimate import estimate_layout
from unisono.run.resolve import resolve_config
from unisono.tasks.source import NamedTask


@pytest.mark.short(1)
@pytest.mark.parametrize(("layout", "workers", "task", "settings"), CASES)
def test_workers_hold_and_send_what_was_foretold(layout, workers, task, settings) -> None:
    assert compare(layout, workers, task, settings) == []


class Reading(nn.Module):
    """Looks at numbers while it computes; has a frozen weight, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.frozen, self.unused = nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(self.used(x))
        out: torch.Tensor = self.last(y if float(y.sum()) < 1e9 else -y)
        return out


def reading() -> Task:
    return Task(Reading, Noisy(96, 0.0), lambda output, batch: ((output - batch[1]) ** 2).mean(),
                defaults={"steps": 1, "global_batch": 24, "micro_batch": 4})  # fmt: skip


def foretold(task: NamedTask, **settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = processes.run(1, _foretold, task, settings)[0]
    return found


def _foretold(rank: int, size: int, task: NamedTask, settings: Mapping[str, Any]) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = task.load()
    laid = estimate_layout(found, resolve_config(found, settings)).mapping()
    return {**laid, "grown": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}


def test_a_model_that_looks_at_numbers_gets_some_and_only_what_learns_has_gradients() -> None:
    laid = foretold(NamedTask("tests.plan.test_layout_estimate:reading", {}, source("regression").directory), workers=1)
    (held,) = laid["holdings"]
    learning = 8 * 4 + 4 + 4 + 1
    assert "computed with values" in laid["notes"][0]
    assert held["parameters"] == 4 * (learning + 2 * (4 * 4 + 4))
    assert held["gradients"] == 4 * learning
    assert held["optimizer"] == 2 * 4 * learning + 4 * 4, "moments, and a count of steps for each of four tensors"


def test_a_model_larger_than_any_memory_is_foretold_without_memory() -> None:
    shape = {"layers": 2, "width": 32768, "heads": 64, "context": 64}
    laid = foretold(source("text", text=(__file__,), model=shape), workers=8, layout="Layout(shard=8)", micro_batch=1,
                    global_batch=8)  # fmt: skip
    assert laid["parameters"] > 25e9
    assert sum(each["total"] * len(each["workers"]) for each in laid["holdings"]) > 400e9
    assert laid["grown"] < 1e9


LAID = {
    "layout": "Layout(shard=2, pipeline=3)", "workers": 6, "replicas": 1, "parameters": 1234567, "micro_batch": 8,
    "micro_batches": 2, "memory": {"name": "this machine", "bytes": 10**10, "shared": True},
    "notes": ["split over the tensor axis: blocks.0.up (column), blocks.1.up (column), head (row)",
              "blocks.0.norm stays whole: no matrix", "blocks.1.norm stays whole: no matrix"],
    "holdings": [
        {"workers": [2 * i, 2 * i + 1], "parameters": 10**6, "buffers": 0, "gradients": 10**6, "optimizer": 2 * 10**6,
         "activations": 10**7, "in_flight": (3 - i) * 10**7, "gathered": 10**5, "total": 10**7,
         "messages": [{"axes": "shard", "kind": "all-gather", "count": 12, "bytes": 10**6}]}
        for i in range(3)
    ],
}  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 140])
def test_it_can_be_looked_at_whatever_the_width(width: int) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=width)
    for each in laid_table.tables(LAID, width):
        console.print(each)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in stream.getvalue()
    for words in ("workers 0–1", "workers 4–5", "30.0 MB", "12 · 1.0 MB", "shard: all-gather"):
        assert any(words in line for line in lines), words
    said = list(laid_table.notes(LAID))
    assert "Split over the tensor axis: blocks.*.up (column), head (row)." in said
    assert "Whole on each: blocks.*.norm (no matrix)." in said
