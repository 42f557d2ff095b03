"""Training runs in real processes, without the start-up time of a launcher."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from tests.support import processes
from unisono import Evaluation, Task
from unisono.launch import StopRequest, WorkerContext, WorkerIdentity
from unisono.run.spec import RunSpec
from unisono.run.worker import run_worker
from unisono.tasks.source import NamedTask

STEPS = 20  # of the runs that are compared

HERE = str(Path(__file__).resolve().parents[2])


def source(name: str, **arguments: Any) -> NamedTask:
    """A task of this module, or a built-in one."""
    built_in = name in ("digits", "text")
    return NamedTask(name if built_in else f"tests.support.training_runs:{name}", arguments, HERE)


def train(size: int, task: NamedTask, path: Path, **settings: Any) -> dict[str, Any]:
    """Run `task` on `size` workers in directory `path`; what worker 0 returns."""
    result: dict[str, Any] = start(size, task, path, settings)[0]
    return result


def losses(path: Path, workers: int, task: NamedTask, **settings: Any) -> dict[int, float]:
    """The loss of every step of a run of `STEPS`."""
    train(workers, task, path, steps=STEPS, workers=workers, record_seconds=0.0, **settings)
    lines = (path / "events.jsonl").read_text().splitlines()
    return {e["step"]: e["loss"] for e in map(json.loads, lines) if e["event"] == "step"}


def differ(found: Mapping[int, float], expected: Mapping[int, float]) -> float:
    """The largest difference of two runs' losses in one step."""
    assert len(found) == STEPS
    assert found.keys() == expected.keys()
    return max(abs(found[step] - expected[step]) for step in found)


def start(size: int, task: NamedTask, path: Path, settings: Mapping[str, Any]) -> list[Any]:
    """What every worker returns; each computes on one thread, as they share the machine with other tests."""
    path.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as rendezvous:
        return processes.run(size, _worker, task, {"threads": 1, **settings}, path, rendezvous, timeout_seconds=120)


def _worker(
    rank: int, size: int, task: NamedTask, settings: dict[str, Any], path: Path, rendezvous: str
) -> dict[str, Any]:
    who = WorkerIdentity(rank, size, rank, size, f"file://{rendezvous}/store", "unisono")
    worker = WorkerContext(who, lambda message: None, StopRequest())
    return run_worker(worker, RunSpec(task, settings, path, time.time()))


class Noisy(Dataset[Any]):
    """Regression with dropout's worst friends: random augmentation, and a fetch per sample."""

    def __init__(self, samples: int, noise: float) -> None:
        random = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(samples, 8, generator=random), torch.randn(samples, 1, generator=random)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = self.noise * torch.randn(8) if self.noise else 0.0
        return self.x[i] + noise, self.y[i]


class Net(nn.Module):
    def __init__(self, dropout: float, norm: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 32),
            nn.BatchNorm1d(32) if norm else nn.Identity(),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(32, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Slowing(torch.optim.Optimizer):
    """Keeps a plain number per parameter, by which its steps become smaller."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                    p -= group["lr"] / self.state[p]["steps"] * p.grad


def regression(
    *, optimizer: str = "adamw", dropout: float = 0.0, noise: float = 0.0, norm: bool = True, hidden_nan_at: int = -1
) -> Task:
    """A small regression, every part of which can be switched."""
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
        "slowing": Slowing,
    }
    data = Noisy(96, noise)
    if hidden_nan_at >= 0:
        data.y[hidden_nan_at] = float("nan")
    return Task(
        model=lambda: Net(dropout, norm),
        data=data,
        loss=lambda output, batch: ((output - batch[1]) ** 2).mean(),
        optimizer=makers[optimizer],
        evaluate=Evaluation(Noisy(50, 0.0), {"mae": lambda output, batch: (output - batch[1]).abs()}, batch=16),
        defaults={"steps": 8, "global_batch": 24, "micro_batch": 4},
        name="regression",
    )


class Tied(nn.Module):
    """Three blocks that share a matrix, a gain and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        for block in self.blocks[1:]:
            block.up.weight, block.gain = self.blocks[0].up.weight, self.blocks[0].gain
            block.register_buffer("scale", self.blocks[0].scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.last(x)
        return out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.rand(width))
        self.register_buffer("scale", torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(x).relu()) * self.gain * self.scale
        return out


def tied() -> Task:
    """`regression` with `Tied`."""
    return replace(regression(optimizer="sgd"), model=Tied, name="tied")


class Wide(nn.Module):
    """Computes in another dtype than what is around it."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width)).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.inner(x.to(self.inner[0].weight.dtype)).to(x.dtype)
        return out


def dtypes(*, dtype: str) -> Task:
    """`regression` with layers of `dtype` among those of float32."""
    between = getattr(torch, dtype)
    model = lambda: nn.Sequential(
        nn.Linear(8, 16), Wide(16, between), nn.Linear(16, 16), Wide(16, between), nn.Linear(16, 1)
    )
    return replace(regression(optimizer="sgd"), model=model, name="dtypes")


def wider() -> Task:
    """`regression` with a layer of another width: a model that its checkpoints do not fit."""
    task = regression()
    return Task(
        model=lambda: nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 1)), data=task.data, loss=task.loss,
        defaults=task.defaults)  # fmt: skip
