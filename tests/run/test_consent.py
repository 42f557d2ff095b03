"""What a joining host runs: what its own command line allows, and nothing else that a coordinator asks for."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.errors import InvalidInput
from unisono.membership.messages import RunSpecMessage
from unisono.run.consent import Consent
from unisono.tasks.source import NamedTask

MINE = """
from subprocess import getoutput
from unisono.tasks.builtin.digits import digits as theirs
def task(): return theirs()
"""
NOT_BELOW = "is not built in, and is not below"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with tasks of one's own, which is the current one."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text(MINE)
    (tmp_path / "loop.py").touch()
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in ("mine", "package", "package.inner"):
        sys.modules.pop(name, None)


def task(name: str, **arguments: Any) -> RunSpecMessage:
    return RunSpecMessage(task=name, arguments=arguments)


def script(*words: str) -> RunSpecMessage:
    return RunSpecMessage(task="", script=list(words))


def test_what_was_said_is_run(here: Path) -> None:
    Consent(task="digits").check(task("digits", hidden=3))
    Consent(task="mine.py:task").check(task(f"{here}/mine.py:task"))
    Consent(task="package.inner:task").check(task("package.inner:task"))
    Consent(script="loop.py").check(script(f"{here}/loop.py", "--lr", "1"))
    Consent(task=f"{here}/mine.py:task", directory="/").check(task(f"{here}/mine.py:task"))


@pytest.mark.parametrize(
    ("consent", "told", "problem"),
    [
        (Consent(task="digits"), task("text"), "--task = digits: the run to join has task text instead"),
        (Consent(task="digits"), script("/bin/true"), "--task = digits: the run to join has script /bin/true instead"),
        (Consent(script="loop.py"), task("digits"), "--script = loop.py: the run to join has task digits instead"),
        (Consent(script="loop.py"), script("/usr/lib/python3/timeit.py"), "the run to join has script"),
        (Consent(), task("digits"), "this host has not agreed to run it; add --task NAME"),
        (Consent(), script("/bin/true"), "this host has not agreed to run it; add --script FILE"),
        (Consent(asks=lambda what: False), task("digits"), "the user of this host declined to run it"),
        (Consent(task="subprocess:getoutput"), task("subprocess:getoutput", cmd="id"), NOT_BELOW),
        (Consent(asks=lambda what: True), task("os:system", command="id"), NOT_BELOW),
        (Consent(asks=lambda what: True), task("posix:system", command="id"), NOT_BELOW),
        (Consent(asks=lambda what: True), task("torch.hub:load", repo="a"), NOT_BELOW),
        (Consent(asks=lambda what: True), task("unisono.tasks.builtin.digits:digits"), NOT_BELOW),
        (Consent(asks=lambda what: True), task(f"{__file__}:task"), NOT_BELOW),
    ],
)
def test_nothing_else_is(here: Path, consent: Consent, told: RunSpecMessage, problem: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(problem)):
        replace(consent, directory=str(here)).check(told)


def test_what_is_installed_below_the_directory_is_no_task() -> None:
    """As with a virtual environment in a project's directory."""
    for root in {Path(torch.__file__).parent.parent, Path(os.__file__).parent}:
        for name in ("torch.hub:load", "subprocess:getoutput"):
            with pytest.raises(InvalidInput, match=NOT_BELOW):
                Consent(asks=lambda what: True, directory=str(root.parent)).check(task(name))


def test_nothing_is_imported_before_it_is_known_where_it_lies(here: Path) -> None:
    (here.parent / "elsewhere.py").write_text("raise SystemExit('it was imported')")
    sys.path.append(str(here.parent))
    with pytest.raises(InvalidInput, match=NOT_BELOW):
        Consent(task="elsewhere:task").check(task("elsewhere:task"))
    with pytest.raises(InvalidInput, match=NOT_BELOW):
        Consent(asks=lambda what: True).check(task(f"{here.parent}/elsewhere.py:task"))


def test_a_link_does_not_lead_out_of_the_directory(here: Path) -> None:
    (here.parent / "outside.py").write_text(MINE)
    (here / "link.py").symlink_to(here.parent / "outside.py")
    with pytest.raises(InvalidInput, match=NOT_BELOW):
        Consent(asks=lambda what: True).check(task(f"{here}/link.py:task"))


@pytest.mark.parametrize("name", ["mine.py:getoutput", "package.inner:getoutput", "mine.py:theirs"])
def test_a_function_that_is_only_imported_there_is_not_called(name: str) -> None:
    with pytest.raises(InvalidInput, match=NOT_BELOW):
        Consent(task=name).check_function(NamedTask(name, {"cmd": "id"}))


@pytest.mark.parametrize("name", ["mine.py:task", "package.inner:task", "digits"])
def test_one_that_is_defined_there_is(name: str) -> None:
    Consent(task=name).check_function(NamedTask(name))


def test_a_person_sees_what_would_run_and_no_more() -> None:
    shown: list[str] = []
    consent = Consent(asks=lambda what: shown.append(what) or True)  # type: ignore[func-returns-value]
    consent.check(task("digits", text="\x1b]0;harmless\x07"))
    consent.check(script("loop.py", "--lr", "1"))
    assert shown == ["task digits text='\\x1b]0;harmless\\x07'", "script loop.py --lr 1"]


def test_a_run_of_ones_own_is_joined_as_it_is() -> None:
    Consent(own=True).check(task("anything.at:all"))
