"""Virtual runs under all faults end with the bits of a run without faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.chaos.fault_schedule import FaultKind, Moment
from unisono.chaos.outcome import RunOutcome
from unisono.chaos.trial import NO_FAULTS, Trial, settings_of, trials
from unisono.chaos.virtual_ground import VirtualGround
from unisono.elastic import state_transfer as state
from unisono.elastic.state_transfer import Progress
from unisono.tasks.builtin.digits import digits
from unisono.tasks.builtin.gpt import GPT
from unisono.tasks.builtin.text import text

ALL = {
    FaultKind.KILL: 3,
    FaultKind.FREEZE: 1,
    FaultKind.PARTITION: 1,
    FaultKind.JOIN: 2,
    FaultKind.DRAIN: 1,
    FaultKind.COORDINATOR: 1,
}
SOURCES = str(Path(state.__file__).parent)
TASKS = {
    "digits": lambda: digits(hidden=2),
    "text": lambda: text(text=(SOURCES,), model=GPT(layers=1, heads=2, width=16, context=16)),
}
SETTINGS = {"steps": 25, "global_batch": 16, "micro_batch": 2, "checkpoint_every": 5, "evaluate_every": 0}


@cache
def undisturbed(name: str) -> tuple[VirtualGround, RunOutcome]:
    task = TASKS[name]()
    ground = VirtualGround.of(replace(task, evaluate=None), settings_of(task, SETTINGS, ALL))
    return ground, ground.run("undisturbed", NO_FAULTS, None, [])


def tried(name: str, seed: int, wanted: Mapping[FaultKind, int] = ALL) -> Trial:
    ground, whole = undisturbed(name)
    (trial,) = trials(ground, whole, [seed], wanted)
    return trial


@pytest.mark.short(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TASKS)
def test_faults_change_nothing(name: str, seed: int) -> None:
    trial = tried(name, seed)
    assert not trial.differences, trial
    assert len(trial.injected) == sum(ALL.values())
    assert len(trial.rows) == 5
    aimed = {each.moment for each in trial.injected if each.kind is FaultKind.KILL}
    assert aimed - {Moment.ANY}, "no kill hit a checkpoint or a handing over"


def test_a_run_without_faults_has_used_each_sample_once_an_epoch() -> None:
    _, whole = undisturbed("digits")
    assert whole.used.keys() == whole.losses.keys() == set(range(1, 26))
    assert {sum(used.values()) for used in whole.used.values()} == {16}
    numbers = [number for used in whole.used.values() for number in used]
    assert len(numbers) == len(set(numbers)) == whole.samples


@pytest.mark.long
def test_the_same_seed_is_the_same_to_the_moment() -> None:
    assert tried("digits", 11).injected == tried("digits", 11).injected


def test_whoever_comes_with_another_state_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*arguments: Any) -> Progress:
        reached = adopt(*arguments)
        with torch.no_grad():
            next(arguments[0].parameters()).mul_(1.001)
        return reached

    adopt = state.load_named_state
    monkeypatch.setattr(state, "load_named_state", forgetful)
    assert tried("digits", 0).differences


def test_a_step_that_is_taken_again_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(*arguments: Any) -> Progress:
        reached = adopt(*arguments)
        return replace(reached, steps=reached.steps - 1) if reached.steps else reached

    adopt = state.load_named_state
    monkeypatch.setattr(state, "load_named_state", backward)
    assert tried("digits", 1, {FaultKind.KILL: 1}).differences
