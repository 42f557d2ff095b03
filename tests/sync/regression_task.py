"""A small regression task that any synchronizer can learn."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.support.replicas import replica_of
from unisono.comm import Communicator, connect
from unisono.compress import Compressor
from unisono.sync import Synchronizer


class RegressionTask:
    """`steps` global batches of `COUNT` micro-batches of different kinds.

    A worker that computes only some of them does not learn the others.
    """

    COUNT, SAMPLES = 8, 8

    def __init__(self, steps: int) -> None:
        random = torch.Generator().manual_seed(5)
        first, second = torch.randn(8, 6, generator=random), torch.randn(2, 8, generator=random)
        x = torch.randn(steps, self.COUNT * self.SAMPLES, 6, generator=random) * 1.5
        order = (x @ first[0]).argsort(dim=1, stable=True)
        self.x = x.gather(1, order[:, :, None].expand_as(x)).view(steps, self.COUNT, self.SAMPLES, 6)
        self.y = torch.tanh(self.x @ first.T / 2) @ second.T
        self.steps = steps
        self.loss_at_start = float(self.y.square().mean())

    def learn(
        self,
        comm: Communicator,
        sync: Synchronizer,
        compress: Compressor,
        busy: Callable[[], None] = lambda: None,
    ) -> tuple[float, list[tuple[int, int]], float]:
        """Train; returns the final loss over all samples, this worker's micro-batches, and seconds of the clock."""
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
        replica = replica_of(model, optimizer, comm, sync=sync, compress=compress, micro_batches=self.COUNT,
                          reference_weight=self.COUNT * self.SAMPLES)  # fmt: skip
        each = range(comm.rank * self.COUNT // comm.size, (comm.rank + 1) * self.COUNT // comm.size)
        shares = replica.sync.work_items(0, self.steps, lambda: False) or ((t, each) for t in range(self.steps))
        computed, began = [], comm.now()
        for t, mine in shares:
            for m in mine:
                busy()
                replica.begin_micro_batch(m, self.SAMPLES)
                loss = mse_loss(model(self.x[t, m]), self.y[t, m])
                replica.end_forward(float(loss.detach()), last=m == mine[-1])
                replica.backward(loss)
                computed.append((t, m))
            replica.settle().apply()
        seconds = comm.now() - began
        replica.synchronize()
        with torch.no_grad():
            return float(mse_loss(model(self.x), self.y)), computed, seconds


def in_a_process(
    rank: int, size: int, steps: int, sync: Synchronizer, compress: Compressor, kind: str, url: str
) -> tuple[float, list[tuple[int, int]]]:
    """The task as one of `size` real workers learns it: the loss at its end, and what was computed here."""
    comm = connect(rank, size, rendezvous=url, local_size=size, kind=kind, timeout_seconds=30)
    try:
        return RegressionTask(steps).learn(comm, sync, compress)[:2]
    finally:
        comm.close()
