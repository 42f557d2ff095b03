"""One worker's part of the model, and its optimizer, as task, configuration and layout say."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.comm import Communicator
from unisono.comm.text import gather_text
from unisono.config import Config
from unisono.data import seed_compute, stream
from unisono.errors import InvalidInput
from unisono.layout import AXES, SHARDING_AXES, BlockOptions, LocalModel, RankMesh, Sample, as_it_is, blocks
from unisono.tasks.task import Task
from unisono.trainer.compatibility import check_fit, check_trainable
from unisono.trainer.optimizer import build_optimizer, prefer_fused
from unisono.trainer.optimizer_coupling import needs_wholes
from unisono.trainer.sync_batchnorm import synchronize_batchnorm
from unisono.trainer.whole_tensor_optimizers import WholeTensorOptimizer


def build_model(
    task: Task, config: Config, device: torch.device, comm: Communicator, mesh: Any = None,
    sample: Sample | None = None, inside: Communicator | None = None,
) -> tuple[LocalModel, Optimizer]:  # fmt: skip
    """This worker's part of the model with its initial weights, and its optimizer.

    Args:
        comm: of the workers that compute different micro-batches.
        mesh: a DeviceMesh of all workers, where a replica is sharded.
        sample: there, an input on which the model may be tried.
        inside: there, of the workers of this replica.

    Raises:
        InvalidInput: what the task builds cannot be trained.
    """
    channel = comm.channel("batchnorm") if config.sync_batchnorm else None
    change = partial(synchronize_batchnorm, comm=channel) if channel else as_it_is
    compute = BlockOptions(
        config.precision, config.activation_checkpointing, config.compile, compiled_whole(config), change
    )
    seed_compute(stream(config.seed, 0, 0, "init"))
    if mesh is not None and sample is not None:
        from unisono.layout.parallelize import parallelize  # imports more of torch than others need

        held = parallelize(lambda: create_model(task), config.layout, mesh, sample, compute)
    else:
        model = compute.change(create_model(task))
        compute.check(model)
        for block in blocks(model):
            compute.prepare(block)
        held = LocalModel.whole(model.to(device))
    wholes = _wholes(task, config, held, device, mesh, inside) if mesh is not None and inside is not None else None
    if wholes is None:
        optimizer = build_optimizer(task.optimizer, [p for p in held.local.parameters() if p.requires_grad])
    else:
        held, optimizer = dataclasses.replace(held, stepping=wholes), wholes.optimizer
    check_fit(held.local, optimizer)
    prefer_fused(optimizer, sparse=bool(held.sparse))
    return held, optimizer


def _wholes(
    task: Task, config: Config, held: LocalModel, device: torch.device, mesh: Any, inside: Communicator
) -> WholeTensorOptimizer | None:
    """Collective among the workers of a replica: steps whole tensors, where the optimizer cannot step shards."""
    mine = json.dumps([p.dim() for p in held.local.parameters() if p.requires_grad])
    dims = {dim for text in gather_text(inside, mine) for dim in json.loads(text)}
    if not needs_wholes(task.optimizer, dims, config.layout, device):
        return None
    places, rank = RankMesh(config.layout, mesh.size()), mesh.get_rank()
    replica = places.along(rank, *AXES)
    group = [replica.index(other) for other in places.along(rank, *SHARDING_AXES)]
    channel = inside.channel("whole tensors")
    return WholeTensorOptimizer(task.optimizer, held.local, held.parts, channel, group, undo=config.recovers_from_loss)


def compiled_whole(config: Config) -> bool:
    """Whether the model is compiled as one, else block by block: layouts and checkpointing act between blocks."""
    return config.layout.workers == 1 and config.activation_checkpointing == "none"


def create_model(task: Task) -> nn.Module:
    """The model of `task`. Raises `InvalidInput` if it cannot be trained."""
    model = task.model()
    if not isinstance(model, nn.Module):
        raise InvalidInput(
            "model", type(model).__name__, "not a torch module", "give Task(model=a function that builds one)"
        )
    check_trainable(model)
    return model
