"""The task of a stored run: a line through points."""

import torch
from torch import nn
from torch.nn import functional

from unisono import Task


def line() -> Task:
    """A small regression."""
    points = torch.linspace(-1, 1, 32).reshape(16, 2)
    data = [(point, point.sum().reshape(1)) for point in points]
    return Task(
        name="line",
        model=lambda: nn.Linear(2, 1),
        data=lambda: data,
        loss=lambda output, batch: functional.mse_loss(output, batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    )
