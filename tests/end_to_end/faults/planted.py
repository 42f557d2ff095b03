"""A small user task with a fault in one worker. Tests find its lines by comments that begin with ``here:``."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import unisono
from unisono import Task

AT = 12  # the fetch, or the forward pass, at which it happens
BAD_SAMPLE = 11
LOCK = threading.Lock()


def faulty() -> bool:
    """Whether this is the worker with the fault."""
    return os.environ["UNISONO_RANK"] == "1"


class Data(Dataset[Any]):
    """96 samples, one file each where `files` says where."""

    def __init__(self, fault: str) -> None:
        self.fault, self.fetched = fault, 0
        random = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(96, 8, generator=random), torch.randn(96, 1, generator=random)
        if fault == "nan":
            self.y[BAD_SAMPLE] = float("nan")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.fetched += 1
        if self.fetched > AT and faulty():
            if self.fault == "sleep":
                threading.Event().wait()  # here: sleep
            if self.fault == "file":
                Path("not-on-this-host.bin").read_bytes()  # here: file
        return self.x[i], self.y[i]


class Net(nn.Module):
    """Two layers."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        width = 33 if fault == "model" and faulty() else 32
        self.first, self.norm, self.last = nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 1)
        self.fault, self.passes, self.kept = fault, 0, list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        x = self.first(x)
        if self.fault == "branch" and not (self.passes > AT and faulty()):
            x = self.norm(x)  # here: branch
        if self.passes > AT and faulty():
            self.go_wrong()
        found: torch.Tensor = self.last(torch.relu(x))
        return found

    def go_wrong(self) -> None:
        """What the fault is, where it is one of computing."""
        if self.fault == "lock":
            LOCK.acquire()  # so did another thread that has died
            with LOCK:  # here: lock
                pass
        if self.fault == "raise":
            raise ValueError("spilled milk")  # here: raise
        if self.fault == "memory":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
            while True:
                self.kept.append(torch.zeros(1 << 22))  # here: memory
        if self.fault == "slow":
            threading.Event().wait(0.02)


def task(*, fault: str = "") -> Task:
    """The task with that fault."""
    return Task(
        model=lambda: Net(fault),
        data=Data(fault),
        loss=lambda output, batch: (output - batch[1]).square().mean(),
        defaults={"steps": 40, "global_batch": 24, "micro_batch": 4},
        name="planted",
    )


def loop(fault: str) -> None:
    """A loop of the user's own, in which all are to do the same."""
    with unisono.join(threads=1) as world:
        model = nn.Linear(8, 1)
        model, optimizer = world.bind(model, torch.optim.SGD(model.parameters(), 0.1))
        for step in range(5):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            if step == 2 and fault == "mismatch" and not faulty():
                world.comm.gather(torch.zeros(3)).wait()  # here: one
            world.comm.sum(torch.zeros(3)).wait()  # here: other


def line_of(fault: str) -> int:
    """The number of the line where it is planted."""
    (found,) = [
        i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith(f"# here: {fault}")
    ]
    return found
