"""Tasks whose steps take their time while a raid is under way, and which end after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.layouts import tasks
from unisono import Task

STEPS, LAST = 60, 6
"""Steps of a run, and how many of them are taken after the raid."""
SAMPLES, BATCH = 48, 24
STEP_SECONDS = 0.03


def paced(over: str) -> Callable[[int, int], float]:
    """A schedule of constant factor 1; a step takes a while as long as there is no file `over`, and the last ones are
    not begun."""

    def factor(step: int, steps: int) -> float:
        while over and not Path(over).exists():
            time.sleep(STEP_SECONDS)
            if step < steps - LAST:
                break
        return 1.0

    return factor


def gpt(*, over: str = "") -> Task:
    """The task of `tests.layouts.tasks`."""
    return replace(tasks.gpt(), schedule=paced(over), defaults={**tasks.STEPS, "steps": STEPS})


class Tally(nn.Module):
    """A number per sample, which grows by one each time that the sample is learned from."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, which: Tensor) -> Tensor:
        return self.seen[which]


def tally(*, over: str = "") -> Task:
    """At the end, each sample's number is how often it was learned from."""
    return Task(
        model=Tally, data=TensorDataset(torch.arange(SAMPLES)), loss=lambda output, batch: -output.mean(),
        inputs=lambda batch: batch[0], optimizer=lambda parameters: torch.optim.SGD(parameters, lr=float(BATCH)),
        schedule=paced(over),
        defaults={"steps": STEPS, "global_batch": BATCH, "micro_batch": 4, "load": "Inline()"})  # fmt: skip
