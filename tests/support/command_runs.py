"""Runs of the command `unisono train` in a directory with a task file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.leftovers import session, within

TASK = """
import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono


def task(*, fails: str = "", samples: int = 96, width: int = 32) -> unisono.Task:
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(samples, 8, generator=random), torch.randn(samples, 1, generator=random)
    if fails == "nan":
        y[11] = float("nan")
    calls = iter(range(10**9))

    def loss(output, batch):
        if fails == "talk":
            print("of a full disk nobody dies " * 100)
        if fails == "raise" and os.environ["UNISONO_RANK"] == "1" and next(calls) == 50:
            raise ValueError("spilled milk")  # the user's line

        last = os.environ["UNISONO_RANK"] == str(int(os.environ["UNISONO_SIZE"]) - 1)
        if fails == "exit" and last and next(calls) == 50:
            raise SystemExit(0)  # as sys.exit(0)
        return (output - batch[1]).square().mean()

    def weight(batch):
        bad = fails == "weight at once" or (fails == "weight" and next(calls) >= 12 * 6)
        return float("nan") if bad else 1.0

    return unisono.Task(
        weight=weight,
        model=lambda: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1)),
        data=TensorDataset(x, y),
        loss=loss,
        defaults={"steps": 600, "global_batch": 24, "micro_batch": 4},
    )


def nothing():
    return 3
"""


STACKS = os.environ | {"PYTHONFAULTHANDLER": "1"}  # printed when a process is aborted


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "unisono", *map(str, words)]


@contextmanager
def running_training(at: Path, run: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A training run of `own.py` that has reached its tenth step, and leaves no process after the block."""
    line = command("train", "own.py:task", "--run-dir", run, *words)
    streams: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, cwd=at, env=STACKS, start_new_session=True, **streams) as process:
        try:
            assert within(90, lambda: last_step(at / run) >= 10), process.stderr
            yield process
            process.wait(90)
            assert within(5, lambda: not session(process.pid)), session(process.pid)
        finally:
            for pid in session(process.pid):
                os.kill(pid, signal.SIGKILL)


def stderr_of(process: subprocess.Popen[str], seconds: float = 120) -> str:
    """The stderr of a process that is ending; with the stacks of its threads if it does not end in time."""
    with suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=seconds)[1]
    process.send_signal(signal.SIGABRT)
    raise AssertionError(process.communicate(timeout=20)[1])


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    if not (run / "events.jsonl").exists():
        return []
    lines = [line for line in (run / "events.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def last_step(run: Path) -> int:
    return max((event["step"] for event in events(run, "step")), default=0)
