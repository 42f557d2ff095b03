"""Loops with a scaler, closures, averages and layers that are unfrozen lose a worker, and keep their bits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.elastic import killed_loops
from tests.elastic.killed_loops import KINDS, Faults, bound
from tests.support.replacements import environment
from tests.trainer.small_loops import data, loss_of, samples, world_of
from unisono import Exact, World
from unisono.checkpoint import fingerprint
from unisono.comm import simulate
from unisono.elastic.loop_group import LoopGroup
from unisono.errors import InvalidInput, UnisonoError


@cache
def undisturbed(kind: str) -> str:
    """The weights of one worker that nothing happens to."""
    (found,) = simulate(1, lambda comm: fingerprint(KINDS[kind](world_of(comm), Faults(Path(), "never", 0))))
    return found


def launched(path: Path, kind: str, moment: str, count: int) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The command that ran a loop on three workers, and what each of them told, by its place."""
    launch = [sys.executable, "-m", "unisono", "launch", "--workers", "3", "--run-dir", "run"]
    done = subprocess.run(
        [*launch, str(killed_loops.__file__), str(path), kind, moment, str(count)], cwd=path, capture_output=True,
        text=True, timeout=150, stdin=subprocess.DEVNULL, env=environment(),
    )  # fmt: skip
    assert len(list(path.glob("killed-*"))) == count, done.stderr
    return done, {each.stem[5:]: json.loads(each.read_text()) for each in path.glob("told-*.json")}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "own_data"])
def test_the_bits_are_those_of_one_worker(kind: str) -> None:
    for found in simulate(3, lambda comm: fingerprint(KINDS[kind](world_of(comm), Faults(Path(), "never", 0)))):
        assert found == undisturbed(kind)


@pytest.mark.short(3)
@pytest.mark.parametrize(
    ("kind", "moment"),
    [("scaler", "pass"), ("closure", "evaluation 2"), ("unfreezing", "next pass"), ("average", "step"),
     ("accumulation", "micro-batch 0"), ("unfreezing", "unfrozen"), ("in_turns", "pass of the second"),
     ("scaler", "update")],
)  # fmt: skip
def test_the_bits_are_those_of_a_run_without_a_loss(kind: str, moment: str, tmp_path: Path) -> None:
    """One of three workers is killed, and its replacement receives what it needs for the steps that are left."""
    done, told = launched(tmp_path, kind, moment, 1)
    assert done.returncode == 0, done.stderr
    assert {place: each["weights"] for place, each in told.items()} == dict.fromkeys("012", undisturbed(kind))
    assert {each["sizes"][-1] for each in told.values()} == {3}


@pytest.mark.long
def test_a_step_that_is_repeated_can_be_repeated_again(tmp_path: Path) -> None:
    """Closures change weights before the last exchange of a step, also of the first one in a view."""
    done, told = launched(tmp_path, "closure", "evaluation 2", 2)
    assert done.returncode == 0, done.stderr
    assert {each["weights"] for each in told.values()} == {undisturbed("closure")}


def test_a_loop_with_data_of_its_own_ends_and_says_how_to_resume(tmp_path: Path) -> None:
    """It accumulates by `no_sync`, in which a worker is killed."""
    done, _ = launched(tmp_path, "own_data", "pass", 1)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "worker 1 failed: killed by SIGKILL (out of memory?), in a loop in which no worker is replaced, since it reads "
        "its own data or keeps state on one worker: start the run again from its newest checkpoint (world.save, "
        "world.load)\n"
    ), done.stderr


def accumulating(world: World) -> None:
    bound(world, torch.optim.Adam)
    next(world.steps(data(), global_batch=8, steps=1))
    world.no_sync().__enter__()


def adding_a_group(world: World) -> None:
    _, optimizer = bound(world, torch.optim.Adam)
    optimizer.add_param_group({"params": []})


def overflowing(world: World) -> None:
    model, _ = bound(world, torch.optim.Adam, compress=Exact())
    (loss_of(model, *samples(0, 1)) * torch.inf).backward()


@pytest.mark.parametrize(
    ("size", "loop", "error", "words"),
    [(1, accumulating, UnisonoError, r"world\.no_sync\(\) in a loop over world\.steps: there gradients of micro-batches"
      " add up by themselves, and are exchanged once; leave it out"),
     (1, adding_a_group, InvalidInput, "add_param_group = Adam: a worker that joins this loop would lack the group, and"
      r" a step that is repeated would add it again; give the optimizer all parameters before world\.steps, "),
     (2, overflowing, ValueError, r"3\.\w+: a gradient of weighted magnitude (inf|nan) is outside the range .*; "
      r"where steps overflow and are left out, as with a GradScaler, use Cast\(\)")],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(
    size: int, loop: Callable[[World], None], error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoopGroup, "recovers", loop is adding_a_group)
    with pytest.raises(error, match=words):
        simulate(size, lambda comm: loop(world_of(comm)))
