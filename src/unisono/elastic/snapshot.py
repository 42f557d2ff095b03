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

from unisono.elastic.state_transfer import Progress, load_named_state, named_state, shared_among


class Snapshot:
    """A copy of a replica's state in host memory, which each synchronization overwrites.

    It is as large as weights, optimizer state and the synchronizer's own state together.

    Attributes:
        progress: the progress at the last synchronization; None before the first one.
    """

    def __init__(self) -> None:
        self.progress: Progress | None = None
        self._tensors: dict[str, Tensor] = {}
        self._numbers: dict[str, float] = {}

    def take(self, model: nn.Module, optimizer: Optimizer, progress: Progress) -> Progress:
        """Copy the state at a synchronization. Returns `progress` with copies of the synchronizer's tensors."""
        tensors, self._numbers = named_state(model, optimizer, progress)
        self._tensors = {name: _copied(tensor, self._tensors.get(name)) for name, tensor in tensors.items()}
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self.progress = replace(progress, shared=shared_among(self._tensors))
        return self.progress

    def restore(self, model: nn.Module, optimizer: Optimizer) -> Progress | None:
        """Copy the snapshot back into `model` and `optimizer`, and return its progress; None if there is none."""
        if self.progress is None:
            return None
        here, numbers = named_state(model, optimizer, self.progress)
        if (here.keys(), numbers) == (self._tensors.keys(), self._numbers):  # the usual case, without a second copy
            for name, tensor in here.items():
                tensor.copy_(self._tensors[name])
        else:
            own = {name: tensor.clone() for name, tensor in self._tensors.items()}
            load_named_state(model, optimizer, own, self._numbers)
        return self.progress


def _copied(tensor: Tensor, into: Tensor | None) -> Tensor:
    """A copy of `tensor`, which overwrites `into` if shape and dtype are the same."""
    if into is None or into.shape != tensor.shape or into.dtype != tensor.dtype:
        into = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return into.copy_(tensor, non_blocking=tensor.is_cuda)
