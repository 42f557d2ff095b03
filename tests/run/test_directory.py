"""Each run has its own directory, without partially written files."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from unisono import Config
from unisono.errors import InvalidInput
from unisono.launch.lock import LOCK, Holder, hold_lock
from unisono.run import directory
from unisono.run.directory import claim_run_directory, with_previous_settings
from unisono.run.spec import PickledTask

SOURCE = PickledTask("some/where.py:my task", b"")


def make(path: Path, **config) -> Path:
    with claim_run_directory(Config(run_dir=str(path), **config), SOURCE, Holder.current()) as found:
        return found


def test_a_new_run_is_made_and_an_old_one_only_resumed(tmp_path) -> None:
    path = tmp_path / "a" / "run"
    assert make(path) == path
    assert (path / "logs").is_dir()
    with pytest.raises(InvalidInput, match=r"run_dir = .*: the directory exists; add --resume"):
        make(path)
    assert make(path, resume=True) == path


def test_an_empty_directory_is_free_and_a_foreign_one_stays_as_it_is(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    make(tmp_path / "empty")
    (tmp_path / "thesis").write_text("mine")
    for taken in (tmp_path, tmp_path / "thesis"):
        with pytest.raises(InvalidInput, match="the directory exists"):
            make(taken)
    assert (tmp_path / "thesis").read_text() == "mine"


@pytest.mark.parametrize(
    ("config", "words"),
    [(Config(resume=True), "no run is named; add --run-dir DIR"),
     (Config(resume=True, run_dir="nowhere"), "there is no such run to resume"),
     (Config(run_dir="/dev/null/run"),
      r"run_dir = /dev/null/run: cannot be written \(Not a directory\); name another")],
    ids=["no run", "no such run", "not a directory"],
)  # fmt: skip
def test_what_cannot_be_is_named(config, words, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=words), claim_run_directory(config, SOURCE, Holder.current()):
        pass
    assert not list(tmp_path.iterdir())


def test_without_a_name_it_gets_one_that_no_other_run_has(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for _ in range(3):
        with claim_run_directory(Config(), SOURCE, Holder.current()) as path:
            found.append(path)
    assert len(set(found)) == 3
    assert all(path.parent == tmp_path / "runs" and path.name.startswith("where.py-my-task-") for path in found)


def test_invalid_input_takes_a_new_run_away_and_leaves_an_old_one(tmp_path) -> None:
    for resume in (False, True):
        with (
            pytest.raises(InvalidInput, match="x = 1"),
            claim_run_directory(Config(run_dir=str(tmp_path / "r"), resume=resume), SOURCE, Holder.current()),
        ):
            raise InvalidInput("x", 1, "wrong", "right")
        assert (tmp_path / "r").exists() == resume
        make(tmp_path / "r", resume=resume)


def test_another_command_that_has_the_directory_keeps_it_as_it_is(tmp_path) -> None:
    with claim_run_directory(
        Config(run_dir=str(tmp_path / "r")), SOURCE, replace(Holder.current(), process=os.getppid())
    ) as path:
        before = sorted(path.rglob("*"))
        for resume, problem in ((True, "in use by process"), (False, "the directory exists")):
            with pytest.raises(InvalidInput, match=problem):
                make(path, resume=resume)
        assert sorted(path.rglob("*")) == before


def test_of_two_commands_that_begin_in_one_directory_one_has_it(tmp_path, monkeypatch) -> None:
    """The other one has looked whether it is free, and is not told before it takes the lock."""
    other = contextlib.ExitStack()

    def late(path: Path, holder: Holder):
        monkeypatch.undo()
        other.enter_context(
            claim_run_directory(Config(run_dir=str(path)), SOURCE, replace(holder, process=os.getppid()))
        )
        return hold_lock(path, holder)

    monkeypatch.setattr(directory, "hold_lock", late)
    with pytest.raises(InvalidInput, match="in use by process"):
        make(tmp_path / "r")
    with other:
        assert {path.name for path in (tmp_path / "r").iterdir()} == {"config.toml", "lock", "logs"}


def test_what_a_killed_start_leaves_is_no_run(tmp_path) -> None:
    make(tmp_path / "r")
    (tmp_path / "r" / "config.toml").unlink()
    assert (tmp_path / "r" / LOCK).exists()
    make(tmp_path / "r")


def test_what_killed_processes_left_is_gone_when_the_run_goes_on(tmp_path) -> None:
    run = make(tmp_path / "r")
    (run / "coordinator").mkdir()
    (run / "checkpoints" / "step-00000050").mkdir(parents=True)
    (run / "checkpoints" / ".step-00000100.7f.tmp").mkdir()
    (run / "checkpoints" / ".step-00000100.7f.tmp" / "part-0.safetensors").touch()
    kept = sorted(path for path in run.rglob("*") if ".step" not in str(path))
    for name in ("coordinator/contact.json", "coordinator/.contact.json.9.tmp", "checkpoints/.LATEST.9.tmp",
                 ".config.toml.9.tmp", ".summary.json.9.tmp", ".0123456789abcdef.seen"):  # fmt: skip
        (run / name).touch()
    make(run, resume=True)
    assert sorted(run.rglob("*")) == kept


def test_another_failure_leaves_the_run_to_be_resumed(tmp_path) -> None:
    with (
        pytest.raises(RuntimeError),
        claim_run_directory(Config(run_dir=str(tmp_path / "r")), SOURCE, Holder.current()),
    ):
        raise RuntimeError
    make(tmp_path / "r", resume=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"lr": 0.5}, {"steps": 9, "epochs": "none", "lr": 0.5}), ({"epochs": 2.0}, {"epochs": 2.0, "lr": 0.1}),
     ({"steps": 20}, {"steps": 20, "lr": 0.1}), ({"lr": None}, {"steps": 9, "epochs": "none", "lr": None})],
    ids=str,
)  # fmt: skip
def test_a_resumed_run_remembers_what_it_was_given(given, expected, tmp_path) -> None:
    make(tmp_path / "r", steps=9, lr=0.1)
    asked = {"run_dir": str(tmp_path / "r"), "resume": True}
    found = with_previous_settings({**asked, **given})
    assert {name: found.get(name) for name in ("steps", "epochs", "lr") if name in found} == expected
    assert with_previous_settings({**asked, **given, "resume": False}) == {**asked, **given, "resume": False}


def test_a_damaged_configuration_is_named(tmp_path) -> None:
    (make(tmp_path / "r") / "config.toml").write_text("steps = [")
    with pytest.raises(InvalidInput, match=r"resume = .*config\.toml: cannot be read"):
        with_previous_settings({"run_dir": str(tmp_path / "r"), "resume": True})
