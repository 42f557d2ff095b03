"""A writer killed at any moment leaves a directory with a complete checkpoint."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.states import unexpected
from tests.support.checkpoints import load, load_newest
from tests.support.processes import start
from unisono.checkpoint import Writer, checkpoints, fingerprint

PLACES = (os.path.join("unisono", "checkpoint", ""), os.path.join("unisono", "atomic.py"))
COMMIT = {"commit_parts", "put_in_place", "write_latest", "write_durably", "move", "attempt", "_replace", "prune",
          "remove", "sweep"}  # fmt: skip
LINES_OF_A_CHECKPOINT = 2000  # at most
LINES_OF_A_COMMIT = 100  # at most, in the functions named


def state(life: int, step: int) -> dict[str, Tensor]:
    return {f"model/{i}": torch.full((4000 + i,), life * 1000.0 + step + i / 8) for i in range(4)}


def _die_at(line: int, only_commit: bool) -> None:
    """SIGKILL this process at the given line that the background threads execute: the same moment on any
    machine."""
    left = line

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        code = frame.f_code
        if not any(place in code.co_filename for place in PLACES) or (only_commit and code.co_name not in COMMIT):
            return None
        left -= event == "line"
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return count

    threading.settrace(count)


def _write(rank: int, size: int, directory: str, life: int, first: int, line: int, only_commit: bool) -> None:
    """Two writers, one checkpoint after the other; each step twice, so that replacing is interrupted too."""
    if line:
        _die_at(line, only_commit)
    writers = [Writer(directory, rank, 2, 2, lambda event: None) for rank in range(2)]
    for step in range(first, first + 1000):
        for _ in range(2):
            for writer in writers:
                writer.stage(step, state(life, step), {"life": life})
            for writer in writers:
                writer.finish()
            writers[0].commit(step)
            writers[0].finish()


def _live_and_die(directory: Path, life: int, first: int, line: int, only_commit: bool) -> None:
    with start(1, _write, str(directory), life, first, line, only_commit) as workers:
        if not line:  # by the clock: also within a system call, where no line ends
            time.sleep(0.02 + 0.01 * (life % 8))
            workers.processes[0].kill()
        workers.processes[0].join(60)
        assert workers.processes[0].exitcode == -signal.SIGKILL


def _lives() -> list[tuple[int, bool]]:
    """(line, only the commit's): a life that succeeds, then everything between, then the clock."""
    chance = random.Random(5)
    commits = [(line, True) for line in range(1, LINES_OF_A_COMMIT, 3)]
    anywhere = [(chance.randrange(1, LINES_OF_A_CHECKPOINT), False) for _ in range(25)]
    return [(3 * LINES_OF_A_COMMIT, True), *commits, *anywhere, *[(0, False)] * 8]


@pytest.mark.long
def test_any_moment_will_do(tmp_path: Path) -> None:
    newest, left_behind = 0, set()
    for life, (line, only_commit) in enumerate(_lives()):
        _live_and_die(tmp_path, life, newest, line, only_commit)
        left_behind |= {path.name.rpartition(".")[2] for path in tmp_path.glob(".*")}
        found = load_newest(tmp_path, unexpected)
        assert found is not None
        assert found.step >= newest
        assert fingerprint(found.tensors) == fingerprint(state(found.meta["life"], found.step))
        newest = found.step
        assert all(load(path).step == step for step, path in checkpoints(tmp_path))
    assert left_behind == {"tmp", "replaced"}  # they did end in the middle of writing and of replacing
