"""Small models, data and worlds for the tests of custom training loops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from unisono import World
from unisono.elastic.loop_group import LoopGroup
from unisono.launch import WorkerIdentity
from unisono.observe import ThreadTracker

SHARE, STEPS = 6, 4


MAKERS: dict[str, Callable] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 1))


def noisy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))


def samples(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(size * SHARE, 5, generator=random), torch.randn(size * SHARE, 1, generator=random)


def world_of(comm) -> World:
    who, watch = WorkerIdentity(comm.rank, comm.size, comm.rank, comm.size), ThreadTracker()
    return World(LoopGroup(who, comm, watch), torch.device("cpu"), watch)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def data(count: int = 40) -> TensorDataset:
    random = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, 5, generator=random), torch.randn(count, 1, generator=random))


def state(model: nn.Module) -> torch.Tensor:
    return torch.cat([t.detach().double().reshape(-1) for t in model.state_dict().values()])
