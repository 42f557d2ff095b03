"""``unisono chaos``: its options, output and exit codes."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unisono.chaos.fault_schedule import FaultKind
from unisono.chaos.trial import dependence
from unisono.cli.chaos import read_request
from unisono.elastic import state_transfer as state
from unisono.elastic.state_transfer import Progress
from unisono.tasks.source import NamedTask

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono


def task(*, width: int = 4) -> unisono.Task:
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    return unisono.Task(
        model=lambda: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1)),
        data=TensorDataset(x, x.sum(1, keepdim=True)),
        loss=lambda output, batch: (output - batch[1]).square().mean(),
        defaults={"steps": 20, "global_batch": 16, "micro_batch": 2},
    )
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(TASK)
    return f"{tmp_path / 'own.py'}:task"


def test_all_that_is_said_is_understood(own: str) -> None:
    line = "--kill 5 --freeze=0 --coordinator 2 --seed 7 --seeds 3 --workers 6 --width 9 --virtual"
    asked = read_request([own, *line.split()])
    assert {kind: asked.wanted[kind] for kind in (FaultKind.KILL, FaultKind.FREEZE, FaultKind.COORDINATOR)} == {
        FaultKind.KILL: 5, FaultKind.FREEZE: 0, FaultKind.COORDINATOR: 2}  # fmt: skip
    assert (asked.seeds, asked.virtual) == (range(7, 10), True)
    assert dict(asked.request.settings) == {"workers": "6"}
    assert asked.request.source.arguments == {"width": "9"}


def test_without_a_word_everything_befalls_a_run(own: str) -> None:
    asked = read_request([own])
    assert all(asked.wanted.values())
    assert (asked.seeds, asked.virtual) == (range(1), False)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--kill", "--kill = (nothing): a value is missing"),
        ("--kill two", "--kill = two: not a whole number from 0"),
        ("--coordinator http://here:1", "--coordinator = http://here:1: not a whole number from 0"),
        ("--seeds 0", "--seeds = 0: no seed is tried"),
        (
            "--listen 10.0.0.1 --certificate none",
            "starts a coordinator of its own for each run; leave out the options about the coordinator",
        ),
        ("--virtual --resume --run-dir here", "resume = True: chaos chooses the directory of each run"),
        ("--virtual --no-elastic", "workers of a run with these settings cannot join or leave"),
        (
            "--virtual --sync ParameterServer() --compress Cast()",
            "workers of a run with these settings cannot join or leave",
        ),
        ("--virtual --workers 1", "use two workers or more"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(
    unisono: Any, own: str, tmp_path: Path, line: str, words: str
) -> None:
    said = unisono(
        "chaos", own, *shlex.split(line.replace("here", str(tmp_path / "here"), 1) if "--run-dir" in line else line)
    )
    assert said.code == 2, said
    assert words in said.err


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, ""),
        ({"compress": "Cast()"}, "the rounding of sums depends"),
        ({"sync": "DiLoCo()"}, "with local steps the result depends"),
    ],
)
def test_why_bits_depend_on_who_takes_part(settings: dict[str, Any], why: str) -> None:
    task = NamedTask("unisono.tasks.builtin.digits:digits").load()
    found = dependence(task, {"workers": 3, "compress": "Exact()", **settings})
    assert why in found
    assert bool(why) == bool(found)


def test_help_needs_no_task_and_tells_the_options_of_one(unisono: Any, own: str) -> None:
    assert "--partition N" in unisono("chaos", "--help").out
    assert "--width" in unisono("chaos", own, "--help").out


def test_equal_runs_are_told_as_such(unisono: Any, own: str, tmp_path: Path) -> None:
    said = unisono("chaos", own, "--virtual", "--seed", "1", "--json", str(tmp_path / "found.json"))
    assert said.code == 0, said
    assert "seed 1: equal after 9 faults" in said.out
    assert "was killed" in said.out
    (found,) = json.loads((tmp_path / "found.json").read_text())["seeds"]
    assert (found["seed"], found["equal"], len(found["happened"])) == (1, True, 9)
    assert [row["name"] for row in found["compared"]] == ["steps", "samples", "losses", "metrics", "weights"]


def test_whoever_does_not_ask_for_the_same_bits_is_told(unisono: Any, own: str) -> None:
    said = unisono("chaos", own, "--virtual", "--steps", "2", "--compress", "Cast()", "--kill", "0")
    assert "without --compress 'Exact()' the rounding of sums depends" in said.out


def test_runs_that_differ_are_told_with_the_command_that_shows_it_again(
    unisono: Any, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backward(*arguments: Any) -> Progress:
        reached = adopt(*arguments)
        return replace(reached, steps=max(0, reached.steps - 1))

    adopt = state.load_named_state
    monkeypatch.setattr(state, "load_named_state", backward)
    said = unisono("chaos", own, "--virtual", "--seeds", "2", "--seed=4", "--workers", "3")
    assert said.code == 1, said
    assert "seed 4: DIFFERENT after" in said.out
    assert "0 of 2 seeds gave the result of the baseline" in said.out
    assert f"unisono chaos {shlex.quote(own)} --virtual --workers 3 --seed 5" in said.out.replace("\n", "")
