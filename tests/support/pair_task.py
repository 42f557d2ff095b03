"""A small real task for every pair of synchronizer and compressor."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.support.replicas import replica_of
from unisono.comm import Communicator
from unisono.compress import Compressor
from unisono.data import MicroBatchPlan, assign
from unisono.sync import Synchronizer
from unisono.tasks.builtin.digits import images

WORKERS, GLOBAL_BATCH, STEPS = 4, 64, 60
COMPUTE_SECONDS = 0.01


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All training images, flat, and their labels."""
    pixels, labels = images(held_out=False).tensors
    return pixels.flatten(1), labels


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def loss_of(model: nn.Module) -> float:
    """Over all training images."""
    x, y = digits()
    with torch.no_grad():
        return float(cross_entropy(model(x), y))


def learn(comm: Communicator, sync: Synchronizer, compress: Compressor, steps: int = STEPS, lr: float = 0.01) -> float:
    """Train on `comm`; the loss at the end, over all training images, of what the replicas agree on."""
    model, (x, y) = network(), digits()
    plan = MicroBatchPlan(len(y), GLOBAL_BATCH, GLOBAL_BATCH // WORKERS, seed=0)
    replica = replica_of(model, torch.optim.Adam(model.parameters(), lr), comm, sync=sync, compress=compress,
                      micro_batches=WORKERS, reference_weight=float(GLOBAL_BATCH))  # fmt: skip
    mine = assign(WORKERS, [1.0] * comm.size)[comm.rank]
    shares = replica.sync.work_items(0, steps, lambda: False) or ((t, mine) for t in range(steps))
    for t, micro_batches in shares:
        for m in micro_batches:
            rows = torch.from_numpy(plan.indices(t, m))
            if hasattr(comm, "compute"):
                comm.compute(COMPUTE_SECONDS)
            replica.begin_micro_batch(m, float(len(rows)))
            loss = cross_entropy(model(x[rows]), y[rows])
            replica.end_forward(float(loss.detach()), last=m == micro_batches[-1])
            replica.backward(loss)
        replica.settle().apply()
    replica.synchronize()
    return loss_of(model)
