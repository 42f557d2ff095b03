"""A task with slow data, so that a run takes time without computing much."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from unisono import Task


class Slow:
    """Numbers, and twice as many."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.01)
        x = torch.full((4,), number / 96)
        return x, x.sum(0, keepdim=True) * 2


def task() -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)),
        data=Slow(),
        loss=lambda output, batch: (output - batch[1]).square().mean(),
        defaults={"steps": 150, "global_batch": 16, "micro_batch": 2, "load": "Inline()"},
    )
