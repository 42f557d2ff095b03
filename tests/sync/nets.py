"""Small networks and a training step for the tests of synchronizers."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.support.replicas import replica_of
from unisono.checkpoint import fingerprint
from unisono.comm import Communicator
from unisono.compress import Compressor
from unisono.data import assign
from unisono.elastic.model_state import weights_of
from unisono.sync import Synchronizer
from unisono.trainer.replica import Replica, Step

MICRO_BATCHES, SAMPLES = 6, 4


class Net(nn.Module):
    """Tied, frozen and unused parameters, batch normalisation and a counter, and sizes that do not align."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 7, sparse=sparse)
        self.first, self.norm, self.second = nn.Linear(7, 17), nn.BatchNorm1d(17), nn.Linear(17, 13)
        self.unused, self.frozen = nn.Linear(3, 3), nn.Linear(13, 13).requires_grad_(False)
        self.head = nn.Linear(13, 10 if sparse else 7, bias=False)
        self.tied = None if sparse else self.embed.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        hidden = torch.relu(self.second(self.norm(self.first(self.embed(x)))))
        out = self.head(self.frozen(hidden))
        return out if self.tied is None else out @ self.tied.T


def batches(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    shape = (steps, MICRO_BATCHES, SAMPLES)
    return torch.randint(0, 10, shape, generator=random), torch.randint(0, 10, shape, generator=random)


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1)


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def plain(optimizer: Callable, steps: int = 5, sparse: bool = False) -> tuple[list[float], nn.Module]:
    """The result of PyTorch without Unisono: all micro-batches one after the other, one step for their mean."""
    torch.manual_seed(0)
    model = Net(sparse)
    optimizer, losses = optimizer(p for p in model.parameters() if p.requires_grad), []
    for xs, ys in zip(*batches(steps)):
        parts = [cross_entropy(model(x), y) / MICRO_BATCHES for x, y in zip(xs, ys)]
        for part in parts:
            part.backward()
        losses.append(float(sum(parts).detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def train(
    comm: Communicator,
    sync: Synchronizer,
    compress: Compressor,
    optimizer: Callable = sgd,
    *,
    steps: int = 5,
    shares: Sequence[float] | None = None,
    sparse: bool = False,
    on_step: Callable[[nn.Module, Step], None] = lambda model, step: None,
    **options,
) -> tuple[list[float], str, nn.Module]:
    """The same on `comm`: losses, the weights' fingerprint, the model."""
    replica = bound(comm, sync, compress, optimizer, sparse=sparse, **options)
    losses = advance(replica, comm, 0, steps, shares=shares, on_step=on_step)
    return losses, fingerprint(weights_of(replica.model)), replica.model


def bound(
    comm: Communicator,
    sync: Synchronizer,
    compress: Compressor,
    optimizer: Callable = sgd,
    *,
    sparse: bool = False,
    **options,
) -> Replica:
    """A new net on `comm`."""
    torch.manual_seed(0)
    model = Net(sparse)
    optimizer = optimizer(p for p in model.parameters() if p.requires_grad)
    return replica_of(model, optimizer, comm, sync=sync, compress=compress, micro_batches=MICRO_BATCHES,
                   reference_weight=MICRO_BATCHES * SAMPLES, **options)  # fmt: skip


def advance(
    replica: Replica,
    comm: Communicator,
    first: int,
    until: int,
    *,
    shares: Sequence[float] | None = None,
    on_step: Callable[[nn.Module, Step], None] = lambda model, step: None,
    wait: bool = True,
) -> list[float]:
    """Take steps ``first .. until - 1``; their losses."""
    mine = assign(MICRO_BATCHES, shares or [1.0] * comm.size)[comm.rank]
    losses = []
    for xs, ys in list(zip(*batches(until)))[first:]:
        for m in mine:
            replica.begin_micro_batch(m, SAMPLES)
            loss = cross_entropy(replica.model(xs[m]), ys[m])
            replica.end_forward(float(loss.detach()), last=m == mine[-1])
            replica.backward(loss)
        step = replica.settle()
        on_step(replica.model, step)
        losses.append(step.loss)
        step.apply()
    if wait:
        replica.sync.wait_parameters()
    return losses
