"""``unisono simulate``: reproducible figures, a table, curves, and messages for invalid input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fake_run import CommandOutput
from tests.support.processes import ignoring

Unisono = Callable[..., CommandOutput]

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono


def task(*, fails: bool = False, width: int = 16) -> unisono.Task:
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(96, 8, generator=random), torch.randn(96, 1, generator=random)

    def loss(output, batch):
        if fails:
            raise ValueError("spilled milk")  # the user's line
        return (output - batch[1]).square().mean()

    return unisono.Task(
        model=lambda: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1)),
        data=TensorDataset(x, y),
        loss=loss,
        evaluate=TensorDataset(x[:32], y[:32]),
        defaults={"steps": 12, "global_batch": 24, "micro_batch": 4},
    )
"""
ON = ("--workers", "3", "--link", "1Mbit", "--latency", "2ms", "--compute", "20ms±10%")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(TASK)
    return tmp_path


def test_one_way_is_a_table_and_a_curve(unisono: Unisono, home: Path) -> None:
    said = unisono("simulate", "own.py:task", *ON)
    assert said.code == 0, said.err
    assert "links of 1Mbit and 2ms, 20ms±10% for 8 samples, global batch 24" in " ".join(said.out.split())
    for words in (
        "● AllReduce()",
        "steps/s",
        "median step",
        "waiting",
        "all 12 steps",
        "held-out loss",
        "loss over time",
    ):
        assert words in said.out, said.out
    assert "loss over bytes" not in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    assert sorted(path.name for path in home.iterdir() if path.name != "__pycache__") == ["own.py"]


def test_ways_are_compared_and_all_of_it_is_written(unisono: Unisono, home: Path) -> None:
    words = ("simulate", "own.py:task", *ON, "--against", "LocalSGD(every=4)", "--against=Exact()", "--json")
    said = unisono(*words, "once.json")
    assert said.code == 0, said.err
    assert "loss over bytes sent by each worker" in said.out
    assert "● AllReduce()   ○ LocalSGD(every=4)   × AllReduce() + Exact()" in said.out
    assert unisono(*words, "twice.json").out == said.out
    once, twice = (json.loads((home / name).read_text()) for name in ("once.json", "twice.json"))
    assert once == twice
    plain, local, exact = once["ways"].values()
    assert plain["steps"] == 12
    assert len(plain["points"]) == 12
    assert plain["step_seconds_low"] <= plain["step_seconds_median"] <= plain["step_seconds_high"]
    assert local["seconds"] < plain["seconds"] < exact["seconds"]
    assert local["bytes_per_worker"] < plain["bytes_per_worker"] < exact["bytes_per_worker"]
    assert (home / "once.json").stat().st_mode & 0o777 == 0o600


def test_auto_measures_and_says_what_it_was(unisono: Unisono, home: Path) -> None:
    said = unisono("simulate", "own.py:task", "--steps", "2", "--workers", "2")
    assert said.code == 0, said.err
    assert "links of 10Gbit and 50us, " in said.out
    assert "ms for 12 samples" in " ".join(said.out.split())


def test_many_workers_need_no_further_words(unisono: Unisono, home: Path) -> None:
    said = unisono("simulate", "own.py:task", "--workers", "16", "--steps", "2", "--compute", "1ms")
    assert said.code == 0, said.err
    assert "global batch 64" in " ".join(said.out.split())


def test_options_of_the_task_and_of_training_hold(unisono: Unisono, home: Path) -> None:
    words = ("simulate", "own.py:task", "--compute", "1ms", "--steps", "2", "--json", "r.json")
    sent = []
    for width in ("16", "64"):
        assert unisono(*words, "--width", width, "--workers", "2").code == 0
        (way,) = json.loads((home / "r.json").read_text())["ways"].values()
        sent.append(way["bytes_per_worker"])
    assert sent[1] > 2 * sent[0]


WRONG = {
    "": "task = (nothing): no task is given",
    "digit": "task = digit: there is no such task; did you mean digits?",
    "own.py:task --link 100": "--link = 100: a unit is missing; write for instance 100Mbit, 1Gbit or 12.5MB/s.",
    "own.py:task --link 100Mb/s": "--link = 100Mb/s: Mb/s is not a unit of a rate",
    "own.py:task --link 0Mbit": "--link = 0Mbit: not above 0",
    "own.py:task --link": "--link = (nothing): a value is missing; write --link RATE.",
    "own.py:task --link 1Gbit,1Gbit --workers 3": "--link = 1Gbit,1Gbit: 2 values for 3 workers; pass one for all, or",
    "own.py:task --latency 20": "--latency = 20: a unit is missing; write for instance 20ms, 50us or 1.5s.",
    "own.py:task --latency -1ms": "--latency = -1ms: not a number and a unit",
    "own.py:task --compute fast": "--compute = fast: fast: not a number and a unit; write for instance 50ms, 50ms±10%",
    "own.py:task --compute 50ms±10": "--compute = 50ms±10: 50ms±10: 10 after ± is not a share from 0% to 100%",
    "own.py:task --compute 1ms,2ms --workers 3": "--compute = 1ms,2ms: 2 times for 3 workers; pass one for all, or",
    "own.py:task --against DiLocco()": "DiLocco is neither a synchronizer nor a compressor; did you mean DiLoCo?",
    "own.py:task --against AllReduce()": "--against = AllReduce(): the same as another variant; omit one of them.",
    "own.py:task --against lr=x": "lr = x: not a number; write a number.",
    "own.py:task --plot curves.jpeg": "--plot = curves.jpeg: not a supported image format; end it with .png",
    "own.py:task --json no/where.json": "--json = no/where.json: there is no directory",
    "own.py:task --resume": "--resume = True: a simulation writes and reads no run; leave it out.",
    "own.py:task --workers 7 --global-batch 24": "workers = 7: a step has only 4 micro-batches",
    "own.py:task --wdth 3": "wdth",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_cannot_work_is_one_sentence(unisono: Unisono, home: Path, line: str) -> None:
    words = ["--compute", "1ms", *line.split(" ")] if line else []
    said = unisono("simulate", *words)
    assert (said.code, said.out) == (2, ""), said
    assert WRONG[line] in said.err
    assert said.err.count("\n") == 1
    assert said.err.rstrip()[-1] in ".?"


def test_an_error_of_the_users_own_is_shown_once(unisono: Unisono, home: Path) -> None:
    said = unisono("simulate", "own.py:task", "--fails", "true", "--compute", "1ms")
    assert said.code == 1
    assert said.err.count("Traceback") == 1
    assert 'raise ValueError("spilled milk")' in said.err
    assert said.err.endswith("worker 0 failed: ValueError: spilled milk\n")


def test_help_tells_of_both_kinds_of_options(unisono: Unisono) -> None:
    said = unisono("simulate", "text", "--help")
    assert said.code == 0
    assert said.out.startswith("usage: unisono simulate TASK [options]\n")
    for option in ("--link RATE", "--against VARIANT", "50ms±10%", "--global-batch N", "--model.layers INT"):
        assert option in said.out


def test_help_imports_no_torch() -> None:
    code = "import sys; from unisono.cli import main; main(['simulate', '--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGINT, signal.SIGTERM]], ids=["usual", "ignored"])
def test_ctrl_c_ends_it_at_once_and_quietly_and_sigterm_where_that_is_ignored(home: Path, numbers: list[int]) -> None:
    *ignored, last = numbers
    words = [sys.executable, "-m", "unisono", "simulate", "own.py:task", *ON, "--steps", "1000000", "--workers", "8"]
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=ignoring(*ignored)
    ) as process:
        assert process.stderr is not None
        try:
            assert "step 1/1,000,000" in process.stderr.readline()
            for number in numbers:
                os.kill(process.pid, number)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 128 + last, err
    assert out == ""
    assert err.endswith(f"interrupted by {signal.Signals(last).name}\n")
    assert "Traceback" not in err
