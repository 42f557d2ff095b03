"""Where replicas that walk by themselves have last met: a copy of all that one has there, to which it goes back when
another is lost on the way.

    meet ──► keep ──► walk ... walk ──► meet ──► keep ──► walk ... ✗ lost
               ▲                                   └── go back ◄──────┘

What a lost worker did since is gone with it, so all others forget what they did since as well: samples are counted
once, and the steps are taken again by those who are there.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.elastic.state_transfer import Progress, adopt, describe, shared_among


class Snapshot:
    """The copy, in host memory, which is taken once and written into again at each meeting. It is as large as the
    weights, the optimizer's state and what the synchronizer keeps besides.

    Attributes:
        reached: how far this worker was there; None before it has met others.
    """

    def __init__(self) -> None:
        self.reached: Progress | None = None
        self._tensors: dict[str, Tensor] = {}
        self._numbers: dict[str, float] = {}

    def take(self, model: nn.Module, optimizer: Optimizer, reached: Progress) -> None:
        """This worker has met the others, and has `reached` so much."""
        tensors, self._numbers = describe(model, optimizer, reached)
        self._tensors = {name: _copied(tensor, self._tensors.get(name)) for name, tensor in tensors.items()}
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self.reached = replace(reached, shared=shared_among(self._tensors))

    def restore(self, model: nn.Module, optimizer: Optimizer) -> Progress | None:
        """Model and optimizer are as they were there, if it was anywhere."""
        if self.reached is None:
            return None
        here, numbers = describe(model, optimizer, self.reached)
        if (here.keys(), numbers) == (self._tensors.keys(), self._numbers):  # as ever: no second copy is made
            for name, tensor in here.items():
                tensor.copy_(self._tensors[name])
        else:
            own = {name: tensor.clone() for name, tensor in self._tensors.items()}
            adopt(model, optimizer, own, self._numbers)
        return self.reached


def _copied(tensor: Tensor, into: Tensor | None) -> Tensor:
    """A copy, `into` memory that has been used before, if it fits."""
    if into is None or into.shape != tensor.shape or into.dtype != tensor.dtype:
        into = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return into.copy_(tensor, non_blocking=tensor.is_cuda)
