"""Replicas of whole models, without a trainer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from unisono.comm import Communicator
from unisono.comm.process_groups import ProcessGroups
from unisono.compress import Compressor
from unisono.layout import LocalModel
from unisono.sync import Synchronizer
from unisono.trainer.replica import Replica, ReplicaOptions


def replica_of(
    model: nn.Module,
    optimizer: Optimizer,
    comm: Communicator,
    sync: Synchronizer,
    compress: Compressor,
    **options: Any,
) -> Replica:
    """All of `model` on each worker of `comm`; `options` as of `ReplicaOptions`."""
    groups = ProcessGroups.replicated(comm)
    return Replica(LocalModel.whole(model), optimizer, groups, sync, compress, ReplicaOptions(**options))
