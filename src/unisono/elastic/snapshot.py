"""A snapshot of one replica at the last synchronization, to which it rolls back when a worker is lost.

    synchronize ──► take ──► local steps ... ──► synchronize ──► take ──► local steps ... ✗ a worker is lost
                                                                   ▲                    │
                                                                   └───── restore ◄─────┘

With local steps, replicas differ between synchronizations. The local steps of a lost worker are lost with it. So the
surviving workers restore their snapshots and repeat the round, and every sample counts once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.elastic.state_transfer import Progress, adopt, describe, shared_among


class Snapshot:
    """A copy in host memory, which each synchronization overwrites.

    It is as large as weights, optimizer state and the synchronizer's own state together.

    Attributes:
        reached: the progress at that time; None before the first synchronization.
    """

    def __init__(self) -> None:
        self.reached: Progress | None = None
        self._tensors: dict[str, Tensor] = {}
        self._numbers: dict[str, float] = {}

    def take(self, model: nn.Module, optimizer: Optimizer, reached: Progress) -> None:
        """Copy the state at a synchronization, whose progress is `reached`."""
        tensors, self._numbers = describe(model, optimizer, reached)
        self._tensors = {name: _copied(tensor, self._tensors.get(name)) for name, tensor in tensors.items()}
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self.reached = replace(reached, shared=shared_among(self._tensors))

    def restore(self, model: nn.Module, optimizer: Optimizer) -> Progress | None:
        """Copy the snapshot back into `model` and `optimizer`, and return its progress; None if there is none."""
        if self.reached is None:
            return None
        here, numbers = describe(model, optimizer, self.reached)
        if (here.keys(), numbers) == (self._tensors.keys(), self._numbers):  # the usual case, without a second copy
            for name, tensor in here.items():
                tensor.copy_(self._tensors[name])
        else:
            own = {name: tensor.clone() for name, tensor in self._tensors.items()}
            adopt(model, optimizer, own, self._numbers)
        return self.reached


def _copied(tensor: Tensor, into: Tensor | None) -> Tensor:
    """A copy of `tensor`, written `into` that one if it fits."""
    if into is None or into.shape != tensor.shape or into.dtype != tensor.dtype:
        into = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return into.copy_(tensor, non_blocking=tensor.is_cuda)
