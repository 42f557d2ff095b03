"""Notices that all workers of a loop compute the same inputs, where each should have its own part of the data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, jit, nn
from xxhash import xxh3_64

from unisono.checkpoint.fingerprint import raw_bytes
from unisono.tensors.batch import tensors
from unisono.trainer.model_hooks import Attached

LOG = logging.getLogger("unisono")
_PASSES = 3
_MOST_WORKERS, _MOST_TENSORS, _MOST_NUMBERS = 8, 8, 1 << 14


class SameInputs:
    """Compares, once, the inputs of the first `_PASSES` forward passes in training between the first `_MOST_WORKERS`
    workers; worker 0 logs a warning if all are the same.

    The digests travel in the control word of a step, so they cost no message.

    Args:
        model: whose forward passes are looked at.
        rank, size: of this worker, and the number of all.

    Attributes:
        words: how many numbers the control word has for it.
    """

    def __init__(self, model: nn.Module, rank: int, size: int) -> None:
        self._rank, self.words = rank, min(size, _MOST_WORKERS)
        self._seen, self._left, self._heard = xxh3_64(), _PASSES, rank >= self.words
        takes_hooks = not (isinstance(model, jit.ScriptModule) or self._heard)
        self._hook = model.register_forward_pre_hook(Attached(self._see), with_kwargs=True) if takes_hooks else None

    def says(self) -> list[float]:
        """This worker's digest in its place, 0 in all others; 0 there too before enough was seen."""
        digest = 0.0 if self._left or self._heard else 1.0 + (self._seen.intdigest() >> 12)  # exact in a float64
        return [digest if rank == self._rank else 0.0 for rank in range(self.words)]

    def hear(self, digests: Sequence[float]) -> None:
        """What all workers said with a step."""
        if self._heard or not all(digests):
            return
        self._heard = True
        if self._rank == 0 and len(set(digests)) == 1:
            LOG.warning(
                "workers 0 to %d computed the same inputs in their first %d forward passes: give each worker its own "
                "part of the data, by world.steps, or by DistributedSampler(data, num_replicas=world.size, "
                "rank=world.rank)", self.words - 1, _PASSES)  # fmt: skip

    def close(self) -> None:
        """Look no more. May be called twice."""
        if self._hook is not None:
            self._hook.remove()

    def _see(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        found = list(islice(tensors((args, kwargs)), _MOST_TENSORS))
        for tensor in found:
            self._seen.update(_beginning(tensor))
        if not found:  # nothing to compare
            self._seen.update(str(self._rank).encode())
        self._left -= 1
        if not self._left:
            self.close()


def _beginning(tensor: Tensor) -> bytes:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return f"{tuple(tensor.shape)}".encode() + bytes(raw_bytes(dense.reshape(-1)[:_MOST_NUMBERS]))
