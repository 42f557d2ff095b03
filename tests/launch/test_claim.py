"""Processes that a worker starts are not workers, although they inherit its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.launch import WorkerIdentity, identify
from unisono.launch.claim import claim_marker, unclaimed

ME, CHILD = 100, 200
OURS = WorkerIdentity(1, 2, 1, 2, "tcp://a:1?attempt=0", "unisono")
TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7",
}  # fmt: skip
THEIRS = WorkerIdentity(1, 2, 1, 2, "tcp://a:7?attempt=0", "torchrun")


def claimed(environ: dict[str, str]) -> dict[str, str]:
    return environ | {"UNISONO_CLAIM": claim_marker(environ, ME)}


@pytest.mark.parametrize(
    ("environ", "process", "identity"),
    [
        (claimed(OURS.environ()), ME, OURS),
        (claimed(OURS.environ()), CHILD, WorkerIdentity()),
        (OURS.environ(), CHILD, OURS),  # nobody has taken it yet: a script that only starts the one that joins
        (claimed(TORCHRUN), CHILD, WorkerIdentity()),
        (claimed(OURS.environ() | TORCHRUN), CHILD, WorkerIdentity()),
        # A launcher inside of a worker has set its own variables since, some of them to the same values.
        (claimed(OURS.environ()) | TORCHRUN, CHILD, THEIRS),
        (claimed(OURS.environ() | TORCHRUN | {"MASTER_PORT": "6"}) | TORCHRUN, CHILD, THEIRS),
        (claimed(TORCHRUN) | OURS.environ(), CHILD, OURS),
    ],
)
def test_identity_of_a_process_when_another_has_claimed_it(environ, process, identity) -> None:
    assert identify(unclaimed(environ, process)) == identity


def said(at: Path, script: str, *words: str, code: int = 0) -> str:
    """What Python prints for `script`, with the error stream."""
    (at / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, *words, "script.py"], cwd=at, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=100, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode != 0) == bool(code), done.stdout
    return done.stdout


LAUNCH = ("-m", "unisono", "launch", "--workers", "2", "--run-dir", "run")
LOADING = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset
import unisono

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.tensor(float(i * i))

def main():
    world = unisono.join(threads=1, device="cpu")
    for method in METHODS:
        loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
        total = sum(batch.sum() for batch in loader)
        print(method, float(total), "of", world.size, "workers", world.mean(float(total)))
    world.close()

"""
GUARDED = 'if __name__ == "__main__":\n    main()\n'


@pytest.mark.long
def test_dataloader_workers_load_where_the_script_has_a_main_guard(tmp_path: Path) -> None:
    shown = said(tmp_path, LOADING.replace("METHODS", "('spawn', 'forkserver')") + GUARDED, *LAUNCH)
    assert shown.splitlines() == [f"{method} 140.0 of 2 workers 140.0" for method in ("spawn", "forkserver")]


@pytest.mark.short(1)
@pytest.mark.parametrize(("method", "words"), [("spawn", ()), ("spawn", LAUNCH), ("forkserver", LAUNCH)])
def test_without_a_main_guard_it_is_one_sentence_with_the_cure(method: str, words, tmp_path: Path) -> None:
    shown = said(tmp_path, LOADING.replace("METHODS", f"({method!r},)") + "main()\n", *words, code=1)
    assert 'put the script\'s actions under `if __name__ == "__main__":`' in shown


CHILDREN = """
import subprocess, sys
import unisono

if len(sys.argv) == 1:
    world = unisono.join(threads=1, device="cpu")
    for words in ([], ["-m", "unisono", "launch", "--workers", "2", "--run-dir", "inner"]):
        if world.rank == 0:
            command = [sys.executable, *words, __file__, "child"]
            print(subprocess.run(command, capture_output=True, text=True, check=True).stdout, end="")
        world.mean(1.0)
else:
    world = unisono.join(threads=1, device="cpu")
    print("child", world.rank, "of", world.size, world.mean(1.0))
world.close()
"""


@pytest.mark.long
def test_a_script_that_a_worker_starts_has_no_identity_or_that_of_its_own_launcher(tmp_path: Path) -> None:
    assert said(tmp_path, CHILDREN, *LAUNCH).splitlines() == ["child 0 of 1 1.0", "child 0 of 2 1.0"]
