"""Detects that all workers of a loop compute the same inputs, where each should have a part of the data."""

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
from unisono.trainer.model_hooks import Attached, in_transform

LOG = logging.getLogger("unisono")
_PASSES = 3
_MAX_WORKERS, _MAX_TENSORS, _MAX_NUMBERS = 8, 8, 1 << 14


class SameInputs:
    """Compares the inputs of workers once, and warns on worker 0 if all are equal.

    It digests the first `_PASSES` forward passes in training, on the first `_MAX_WORKERS` workers. The digests travel
    in the control word of a step, so they need no message.

    Args:
        model: whose inputs are compared.
        rank, size: the rank of this worker, and the number of workers.

    Attributes:
        words: the count of numbers that the control word has for it.
    """

    def __init__(self, model: nn.Module, rank: int, size: int) -> None:
        self._rank, self.words = rank, min(size, _MAX_WORKERS)
        self._digest, self._passes_left, self._done = xxh3_64(), _PASSES, rank >= self.words
        needs_hook = not (isinstance(model, jit.ScriptModule) or self._done)
        self._hook = (
            model.register_forward_pre_hook(Attached(self._add_inputs), with_kwargs=True) if needs_hook else None
        )

    def control_word(self) -> list[float]:
        """This worker's digest at its rank, and 0 at all others; 0 there too until enough passes were digested."""
        due = not (self._passes_left or self._done)
        digest = 1.0 + (self._digest.intdigest() >> 12) if due else 0.0  # exact in a float64
        return [digest if rank == self._rank else 0.0 for rank in range(self.words)]

    def compare(self, digests: Sequence[float]) -> None:
        """Compare the digests of all workers from one step's control word."""
        if self._done or not all(digests):
            return
        self._done = True
        if self._rank == 0 and len(set(digests)) == 1:
            LOG.warning(
                "workers 0 to %d computed the same inputs in their first %d forward passes: give each worker its own "
                "part of the data, by world.steps, or by DistributedSampler(data, num_replicas=world.size, "
                "rank=world.rank)", self.words - 1, _PASSES)  # fmt: skip

    def close(self) -> None:
        """Remove the hook. May be called more than once."""
        if self._hook is not None:
            self._hook.remove()

    def _add_inputs(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not (model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling() or in_transform():
            return
        inputs = list(islice(tensors((args, kwargs)), _MAX_TENSORS))
        for tensor in inputs:
            self._digest.update(_prefix_bytes(tensor))
        if not inputs:  # no tensors to compare: make the digests differ
            self._digest.update(str(self._rank).encode())
        self._passes_left -= 1
        if not self._passes_left:
            self.close()


def _prefix_bytes(tensor: Tensor) -> bytes:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return f"{tuple(tensor.shape)}".encode() + bytes(raw_bytes(dense.reshape(-1)[:_MAX_NUMBERS]))
