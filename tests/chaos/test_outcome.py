"""Outcomes of two runs are compared field by field, and each difference is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unisono.chaos.outcome import RunOutcome, compare, losses

WHOLE = RunOutcome(2, 8, {1: [0.5], 2: [0.25]}, {"accuracy": 0.75}, "ab" * 32, {1: {3: 1, 4: 1}, 2: {5: 1}})


def test_a_run_is_equal_to_itself() -> None:
    assert [row.name for row in compare(WHOLE, WHOLE)] == ["steps", "samples", "losses", "metrics", "weights"]
    assert not any(row.differs for row in compare(WHOLE, WHOLE))


@pytest.mark.parametrize(
    ("changed", "row", "words"),
    [
        ({"steps": 3, "losses": {1: [0.5], 2: [0.25], 3: [0.1]}}, "steps", "2 without faults, 3 with faults"),
        ({"samples": 9}, "samples", "8 without faults, 9 with faults"),
        (
            {"used": {1: {3: 1, 4: 2}, 2: {5: 1}}},
            "samples",
            "step 1 used sample 4: 1 times without faults, 2 times with faults",
        ),
        ({"used": {1: {3: 1, 4: 1}}}, "samples", "step 2 used sample 5: 1 times without faults, 0 times with faults"),
        ({"losses": {1: [0.5], 2: [0.26]}}, "losses", "step 2: 0.25 without faults, 0.26 with faults"),
        ({"losses": {1: [0.5]}}, "losses", "step 2: 0.25 without faults, none with faults"),
        ({"losses": {1: [0.5, 0.6], 2: [0.25]}}, "losses", "step 1: 0.5 without faults, 0.5 and 0.6 with faults"),
        ({"metrics": {"accuracy": 0.5}}, "metrics", "accuracy 0.75 without faults, accuracy 0.5 with faults"),
        ({"weights": "cd" * 32}, "weights", f"{'ab' * 32} without faults, {'cd' * 32} with faults"),
    ],
)
def test_a_difference_is_named(changed: dict[str, Any], row: str, words: str) -> None:
    found = {each.name: each.differs for each in compare(WHOLE, replace(WHOLE, **changed))}
    assert found[row] == words


def test_the_record_has_each_value_once_and_views_say_what_died_with_whoever_recorded(tmp_path: Path) -> None:
    events = [
        {"event": "start"},
        {"event": "step", "step": 1, "loss": 0.5},
        {"event": "view", "step": 2, "loss": 0.25},
        {"event": "step", "step": 2, "loss": 0.25},
        {"event": "step", "step": 3, "loss": 0.125},
        {"event": "step", "step": 3, "loss": 0.126},
        {"event": "view", "step": 0, "loss": "nan"},
    ]
    lines = [json.dumps(event) for event in events]
    (tmp_path / "events.jsonl").write_text("\n".join([*lines, '{"event": "step", "st']))
    assert losses(tmp_path) == {1: [0.5], 2: [0.25], 3: [0.125, 0.126]}
