"""A task of one's own: tell three clouds of points in the plane apart."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from unisono import Cosine, Evaluation, Task


def points(samples: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    cloud = torch.randint(3, (samples,), generator=random)
    centres = torch.tensor([[0.0, 2.0], [-2.0, -1.0], [2.0, -1.0]])
    return TensorDataset(centres[cloud] + torch.randn(samples, 2, generator=random), cloud)


def blobs(*, samples: int = 3000, width: int = 32) -> Task:
    return Task(
        name="blobs",
        model=lambda: nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 3)),
        data=points(samples, seed=0),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        evaluate=Evaluation(points(600, seed=1), {"accuracy": lambda output, batch: output.argmax(1) == batch[1]}),
        schedule=Cosine(warmup=5),
        defaults={"steps": 150, "global_batch": 64},
    )
