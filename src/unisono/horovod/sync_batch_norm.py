"""Batch normalization over the batches of all workers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unisono.horovod.collectives import allgather_async, allreduce_async, synchronize
from unisono.horovod.handle import Handle
from unisono.horovod.participant import current
from unisono.horovod.reductions import Sum
from unisono.trainer import sync_batchnorm


class BatchNormOverWorkers(sync_batchnorm.SyncBatchNorm):
    """Normalizes ``[samples, features, ...]`` by mean and variance over all workers, in training, on any device.

    Collective in training: all workers call the same layers in the same order.
    """

    @property
    def comm(self) -> Any:  # type: ignore[override]
        """The operations that the layer needs."""
        return _Verbs()


SyncBatchNorm = BatchNormOverWorkers  # Horovod's name


class _Verbs:
    """Operations of all workers, as the layer calls them."""

    @property
    def size(self) -> int:
        return current().size

    def gather(self, x: Tensor) -> _Waiting:
        return _Waiting(allgather_async(x.unsqueeze(0)))

    def sum(self, x: Tensor) -> _Waiting:
        return _Waiting(allreduce_async(x, op=Sum))


class _Waiting:
    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def wait(self) -> Any:
        return synchronize(self._handle)
