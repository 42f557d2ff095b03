"""Accelerate and transformers' Trainer come to the same weights on two workers as alone, by the real packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.errors import InvalidInput
from unisono.frameworks.accelerate import Accelerator
from unisono.sync import AllReduce

SCRIPT = Path(__file__).parent / "accelerate_script.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
UNISONO = [sys.executable, "-m", "unisono", "launch", "--workers", "2"]


def told(start: list[str], directory: Path) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    file = directory / "told.json"
    done = subprocess.run([*start, str(SCRIPT), str(file)], cwd=directory, env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=170)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return told([sys.executable], tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module", params=[UNISONO, pytest.param(TORCHRUN, marks=pytest.mark.long)],
                ids=["unisono launch", "torchrun"])  # fmt: skip
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return told(request.param, tmp_path_factory.mktemp("together"))


def close(found: list[float], expected: list[float], atol: float) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=atol)


def test_gradients_go_through_the_class_of_unisono(together: dict[str, Any]) -> None:
    assert (together["workers"], together["kind"]) == (2, "DistributedDataParallel")
    assert not any(key.startswith("module.") for key in together["keys"])


@pytest.mark.parametrize("way", ["mean", "clipped", "accumulated", "resumed"])
def test_weights_are_those_of_one_process(way: str, alone: dict[str, Any], together: dict[str, Any]) -> None:
    close(together[way], alone[way], 1e-6)
    assert alone["resumed"] == alone["mean"] != alone["clipped"]


@pytest.mark.parametrize("way", ["trainer", "trainer resumed", "trainer accumulated"])
def test_the_trainer_comes_to_the_same(way: str, alone: dict[str, Any], together: dict[str, Any]) -> None:
    close(together[way], alone[way], 2e-5)  # Adam divides by small numbers


def test_mixed_precision_rounds_as_much_as_alone(alone: dict[str, Any], together: dict[str, Any]) -> None:
    close(together["bf16"], alone["bf16"], 5e-3)


@pytest.mark.parametrize(("way", "atol"), [("exact", 1e-6), ("fp16", 1e-3)])
def test_compressors_work_there(way: str, atol: float, alone: dict[str, Any], together: dict[str, Any]) -> None:
    close(together[way], alone["mean"], atol)
    assert together["compressor"].startswith("Exact(")
    assert together["fp16"] != together["mean"]


@pytest.mark.parametrize("way", ["LocalSGD", "ParameterServer"])
def test_other_synchronizers_take_the_steps(way: str, alone: dict[str, Any], together: dict[str, Any]) -> None:
    """In settings in which they compute the same as the mean of gradients."""
    close(together[way], alone["mean"], 1e-6)


def test_the_trainer_takes_local_steps(together: dict[str, Any]) -> None:
    assert together["trainer LocalSGD"] != together["trainer"]


class Configured:
    """An Accelerator that is configured to divide the model."""

    class distributed_type:
        value = "FSDP"


def test_what_divides_the_model_is_refused_with_a_cure() -> None:
    existing: Any = Configured()

    class Adopts(Configured, Accelerator):
        pass

    with pytest.raises(InvalidInput, match=r"distributed_type = FSDP: there Accelerate divides the model itself"):
        Adopts.adopt(existing, AllReduce(), "Cast()")


LOST = """
import os, signal
import torch
from torch.nn import functional as F
from unisono.frameworks.accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(5, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
for step in range(1000):
    if step == 3 and accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    accelerator.backward(model(torch.randn(4, 5)).square().mean())
    optimizer.step()
"""


def test_a_lost_worker_ends_the_run_and_is_named(tmp_path: Path) -> None:
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    done = subprocess.run([*UNISONO, str(script)], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=170)  # fmt: skip
    assert done.returncode == 1
    assert "worker 1" in done.stderr.splitlines()[-1], done.stderr
    assert "SIGKILL" in done.stderr
