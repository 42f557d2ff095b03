"""A small GPT whose weights also count how often each sample was used.

One parameter, `tally`, has an element for each sample of the dataset. Its gradient is the weight of the sample in the
mean, and its learning rate is the global batch, so that a step adds 1 to the elements of its samples. It is averaged,
checkpointed and transferred like all other weights, by any framework. Lost or repeated samples show in the result.

Each process writes a line of JSON to its own file for every step of its optimizer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from unisono import Task
from unisono.system.process import age_seconds
from unisono.tasks.builtin.gpt import GPT

SAMPLES = 1 << 14
CONTEXT = 64  # bytes
GLOBAL_BATCH, MICRO_BATCH = 24, 2
ENOUGH = "enough"  # once there is a file of that name, each process writes its tally down


class Marks:
    """What this process does, one line each: ``<pid>.jsonl`` in `folder`; a line is written at once, as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._log_file, self.computed = folder, False, 0
        self._file = os.open(folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        now = time.monotonic()
        self._write({"at": now, "born": now - age_seconds()})

    def step(self, tally: Tensor, workers: int = 0) -> None:
        """The optimizer has stepped; `workers` of them took part, where that is known here."""
        at, steps = time.monotonic(), round(float(tally.detach().sum()) / GLOBAL_BATCH)
        self._write({"at": at, "step": steps, "computed": self.computed, "workers": workers})
        self.computed = 0
        if not self._log_file and (self._folder / ENOUGH).exists():
            self._log_file, path = True, self._folder / f"{os.getpid()}.tally"
            np.savez(path.with_suffix(".part.npz"), tally=tally.detach().numpy(), steps=steps)
            path.with_suffix(".part.npz").rename(path.with_suffix(".npz"))

    def _write(self, fields: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(fields).encode() + b"\n")


_marks: dict[int, Marks] = {}


def marks(folder: Path) -> Marks:
    """This process's."""
    pid = os.getpid()
    if pid not in _marks:  # a fork's are not its parent's
        _marks[pid] = Marks(folder)
    return _marks[pid]


class Tallied(nn.Module):
    """Rows of a sample's number and its bytes to logits and the sample's place in the tally."""

    def __init__(self, folder: Path, layers: int) -> None:
        super().__init__()
        self.body = GPT(layers=layers, width=128, heads=4, context=CONTEXT).build()
        self.tally = nn.Parameter(torch.zeros(SAMPLES))
        self._folder = folder

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        marks(self._folder).computed += 1
        return self.body(rows[:, 1:-1]), self.tally[rows[:, 0]]


def samples() -> TensorDataset:
    """Windows of random bytes, each after its number."""
    windows = torch.randint(256, (SAMPLES, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(torch.cat([torch.arange(SAMPLES)[:, None], windows], 1))


def loss(output: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    """As of any GPT; and nothing, falling by 1 with the tally of each sample, in the mean over samples."""
    logits, tally = output
    return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 2:].flatten()) - (tally - tally.detach()).mean()


def optimizer(parameters: Iterable[nn.Parameter], folder: Path, *, marked: bool = True) -> Optimizer:
    """SGD with momentum, but plain for the tally; `marked`: which writes down when it steps."""
    weights = list(parameters)
    (tally,) = (each for each in weights if each.shape == (SAMPLES,))
    groups = [
        {"params": [each for each in weights if each is not tally]},
        {"params": [tally], "lr": float(GLOBAL_BATCH), "momentum": 0.0},
    ]
    made = SGD(groups, lr=0.01, momentum=0.9)
    if marked:
        made.register_step_post_hook(lambda *_: marks(folder).step(tally))
    return made


def task(*, folder: str, layers: int = 2) -> Task:
    """All of it, for ``unisono train``."""
    where = Path(folder)
    return Task(
        model=partial(Tallied, where, layers),
        data=samples,
        loss=loss,
        optimizer=partial(optimizer, folder=where),
        defaults={"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH},
        name="tallied",
    )
