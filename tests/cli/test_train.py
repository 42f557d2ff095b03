"""``unisono train``: what reaches the run, what is printed, and messages for invalid input."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_run import CommandOutput, FakeRun, Result
from unisono.errors import Diverged, InvalidInput, WorkerFailed
from unisono.launch.stop_request import Interrupted
from unisono.observe import write_config
from unisono.tasks.source import NamedTask

Unisono = Callable[..., CommandOutput]

OPTIONS: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
    ("digits", {}, {}),
    ("digits --workers 2 --steps 5", {"workers": "2", "steps": "5"}, {}),
    ("--workers 2 digits", {"workers": "2"}, {}),
    ("digits --workers=2 --workers 3", {"workers": "3"}, {}),
    ("digits --global-batch 64 --lr 1e-3", {"global_batch": "64", "lr": "1e-3"}, {}),
    ("digits --sync AllReduce() --compress Exact()", {"sync": "AllReduce()", "compress": "Exact()"}, {}),
    ("digits --resume --no-overlap", {"resume": True, "overlap": False}, {}),
    ("digits --clip none", {"clip": None}, {}),
    ("digits --hidden 8 --workers 2", {"workers": "2"}, {"hidden": "8"}),
    ("digits --hidden=8", {}, {"hidden": "8"}),
    ("digits --flag", {}, {"flag": True}),
    ("digits --shift -3 --lr 1", {"lr": "1"}, {"shift": "-3"}),
    ("text --text a b --seed 1", {"seed": "1"}, {"text": ["a", "b"]}),
    ("text --model.layers 4 --model.width 64", {}, {"model": {"layers": "4", "width": "64"}}),
    ("text --set model.layers=4 --set lr=0.1", {"lr": "0.1"}, {"model": {"layers": "4"}}),
    ("text --lr 1 --set lr=2", {"lr": "2"}, {}),
    ("text --set global-batch=8", {"global_batch": "8"}, {}),
    ("text --set name=a=b", {}, {"name": "a=b"}),
    ('text --set text=["a","b"]', {}, {"text": ["a", "b"]}),
]


@pytest.mark.parametrize(("line", "settings", "arguments"), OPTIONS, ids=[line for line, _, _ in OPTIONS])
def test_options_reach_the_run(
    unisono: Unisono, played: FakeRun, line: str, settings: Mapping[str, Any], arguments: Mapping[str, Any]
) -> None:
    said = unisono("train", *line.split(" "))
    assert said.code == 0, said.err
    assert played.settings == settings
    assert played.source == NamedTask("text" if "text" in line else "digits", arguments, os.getcwd())


def test_an_option_beats_the_file_and_set_beats_both(unisono: Unisono, played: FakeRun, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        'workers = 3\nsteps = 7\nlr = 0.5\ncompress = "Exact()"\n'
        '[task]\nname = "text"\ntext = ["a"]\n[task.model]\nlayers = 2\nwidth = 8\n'
    )
    said = unisono(
        "train",
        "--config",
        str(file),
        "--steps",
        "8",
        "--set",
        "lr=0.1",
        "--model.layers",
        "4",
        "--lr",
        "0.2",
    )
    assert said.code == 0, said.err
    assert played.settings == {"workers": 3, "steps": "8", "lr": "0.1", "compress": "Exact()"}
    assert played.source is not None
    assert played.source.name == "text"
    assert played.source.arguments == {"text": ["a"], "model": {"layers": "4", "width": 8}}


def test_the_task_on_the_command_line_beats_the_file(unisono: Unisono, played: FakeRun, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[task]\nname = "text"\n')
    assert unisono("train", "digits", "--config", str(file)).code == 0
    assert played.source is not None
    assert played.source.name == "digits"


def test_the_config_of_a_run_can_be_used_again(unisono: Unisono, played: FakeRun, tmp_path: Path) -> None:
    from unisono.config import Config

    config = Config.of(
        {"workers": 2, "steps": 5, "clip": 1.0, "compress": "Exact()", "run_dir": "runs/a", "resume": True}
    )
    arguments = {"text": ["a b", "ö"], "model": {"layers": "4", "dropout": None}}
    write_config(tmp_path, config.mapping(), "text", arguments)
    assert unisono("train", "--config", str(tmp_path / "config.toml")).code == 0
    assert played.settings is not None
    assert Config.of(played.settings) == Config.of({**config.mapping(), "run_dir": None, "resume": False})
    assert played.source is not None
    assert played.source.name == "text"
    assert played.source.arguments == {"text": ["a b", "ö"], "model": {"layers": "4"}}
    assert (tmp_path / "config.toml").stat().st_mode & 0o777 == 0o600
    assert tomllib.loads((tmp_path / "config.toml").read_text())["task"]["name"] == "text"


def test_json_is_handed_on_as_a_path(unisono: Unisono, played: FakeRun, tmp_path: Path) -> None:
    assert unisono("train", "digits", "--json", str(tmp_path / "r.json")).code == 0
    assert played.json == tmp_path / "r.json"


WRONG = [
    ("train", "task = (nothing): no task is given; begin with one"),
    ("train digit", "task = digit: there is no such task; did you mean digits?"),
    ("train zzz", "known: digits, text"),
    ("train nowhere.py:f", "task = nowhere.py:f: there is no file nowhere.py; check the path."),
    ("train nowhere.py", "task = nowhere.py: names no function; write nowhere.py:function."),
    ("train digits text", "task = digits text: more than one task is given"),
    ("train digits --workers", "--workers = (nothing): expected one argument; see unisono train --help."),
    ("train digits --set lr", "--set = lr: not KEY=VALUE; write for instance --set lr=0.001."),
    ("train digits --set text=[1", "--set = text=[1: not a list"),
    ("train digits --config no.toml", "--config = no.toml: cannot be read (No such file or directory)"),
    ("train digits --json no/where.json", "--json = no/where.json: there is no directory"),
    ("train digits --json .", "--json = .: not a file that can be written"),
    ("train digits -x", "-x = (nothing): there is no such option"),
    ("trian digits", "command = trian: there is no such command; did you mean train?"),
    ("--verson", "command = --verson: there is no such command; did you mean --version?"),
    ("tasks all", "tasks = all: it takes no arguments"),
]


@pytest.mark.parametrize(("line", "says"), WRONG, ids=[line for line, _ in WRONG])
def test_what_cannot_work_is_one_sentence_and_starts_nothing(
    unisono: Unisono, played: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = unisono(*line.split(" "))
    assert (said.code, said.out) == (2, "")
    assert says in said.err
    assert said.err.count("\n") == 1
    assert played.source is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("steps = ", "not TOML"),
        ("stps = 3", "stps = 3: there is no such setting (in {}); did you mean steps?"),
        ('task = "digits"', "task = digits: in {} it is not a table"),
        (b"\xff", "not TOML"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    unisono: Unisono, played: FakeRun, tmp_path: Path, content: str | bytes, says: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = unisono("train", "digits", "--config", str(file))
    assert said.code == 2
    assert says.format(file) in said.err
    assert str(file) in said.err


def raising(error: BaseException) -> Callable[[Any], Result]:
    def act(on_message: Callable[[int, Mapping[str, Any]], None]) -> Result:
        on_message(0, {"kind": "run", "path": "runs/a b"})
        raise error

    return act


def test_invalid_input_of_the_run_is_printed_the_same_way(unisono: Unisono, played: FakeRun) -> None:
    played.act = raising(InvalidInput("workers", 9, "more than the 4 micro-batches of a step", "use 4 or fewer"))
    said = unisono("train", "digits")
    assert said.code == 2
    assert said.err.endswith("workers = 9: more than the 4 micro-batches of a step; use 4 or fewer.\n")


def test_the_traceback_of_a_worker_comes_first_and_once(unisono: Unisono, played: FakeRun) -> None:
    trace = "Traceback (most recent call last):\n  File …\nValueError: bad"
    played.act = raising(WorkerFailed(2, "ValueError: bad", trace))
    said = unisono("train", "digits")
    assert said.code == 1
    going_on = "the run directory is runs/a b; resume with  unisono train --run-dir 'runs/a b' --resume\n"
    assert said.err.endswith(f"{trace}\n\nworker 2 failed: ValueError: bad\n{going_on}")
    assert said.err.count("Traceback") == 1


def test_other_errors_of_a_run_are_their_message(unisono: Unisono, played: FakeRun) -> None:
    played.act = raising(Diverged("step 3, micro-batch 1, worker 0: the loss is nan"))
    said = unisono("train", "digits")
    assert said.code == 2
    assert said.err.splitlines()[-1] == "step 3, micro-batch 1, worker 0: the loss is nan"


def test_an_interrupted_run_says_where_it_lies_and_how_to_go_on(unisono: Unisono, played: FakeRun) -> None:
    played.act = raising(Interrupted(2, (), "stopped on request after 87 of 200 steps"))
    said = unisono("train", "digits")
    assert said.code == 130
    assert "interrupted by SIGINT: stopped on request after 87 of 200 steps\n" in said.err
    assert "unisono train --run-dir 'runs/a b' --resume\n" in said.err
    assert said.out == ""


def test_ctrl_c_before_the_run_is_no_traceback(unisono: Unisono, played: FakeRun) -> None:
    played.act = raising(KeyboardInterrupt())
    assert unisono("train", "digits").code == 130


def test_the_summary_has_what_a_user_asks_first(unisono: Unisono, played: FakeRun) -> None:
    said = unisono("train", "digits")
    assert said.code == 0
    for text in (
        "0.004212",
        "accuracy       0.9916",
        "4,321 samples/s",
        "3f" * 32,
        "runs/digits-1",
        "--resume --steps 480",
    ):
        assert text in said.out


@pytest.mark.parametrize(("act", "code"), [(None, 0), (Interrupted(15), 143)], ids=["complete", "stopped"])
def test_only_worker_0_speaks_under_another_launcher(
    unisono: Unisono, played: FakeRun, monkeypatch: pytest.MonkeyPatch, act: Interrupted | None, code: int
) -> None:
    played.act = raising(act) if act else played.act
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert unisono("train", "digits") == CommandOutput(code, "", "")
    assert played.source is not None
