"""Torch's own sharding, tensor parallelism and pipelining in plain loops, written by hand for one model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from timed_model import Batch, batches, built, fused, loss, timed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from unisono.tasks.builtin.gpt import Attention

Step = Callable[[int], None]
Way = Callable[[argparse.Namespace, list[list[Batch]], list[Tensor]], Step]


def train(asked: argparse.Namespace) -> dict[str, float]:
    """Seconds of the median step, and the loss of the last one over its whole batch."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    held = [batches(asked.model, t, asked.global_batch, asked.micro_batch) for t in range(asked.steps)]
    losses: list[Tensor] = []  # of the last step's micro-batches that this worker knows of
    seconds = timed(WAYS[asked.way](asked, held, losses), asked.steps)
    totals = torch.tensor([sum(map(float, losses)), len(losses)], dtype=torch.float64)
    dist.all_reduce(totals)
    return {"step_seconds_median": seconds, "loss": float(totals[0] / totals[1])}


def fsdp(asked: argparse.Namespace, held: list[list[Batch]], losses: list[Tensor]) -> Step:
    """`fully_shard`, block by block; every worker computes one micro-batch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, me = built(asked.model), dist.get_rank()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain(model, [fused(model.parameters())], [step[me] for step in held], losses)


def tensor(asked: argparse.Namespace, held: list[list[Batch]], losses: list[Tensor]) -> Step:
    """`parallelize_module` with the plan of Megatron-LM; all workers compute the same micro-batch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = built(asked.model)
    for block in model.blocks:
        block.attention.forward = partial(attend, block.attention)
        by_heads(block.attention.query_key_value, mesh)
        parallelize_module(block, mesh, {
            "attention.query_key_value": ColwiseParallel(), "attention.output": RowwiseParallel(),
            "mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})  # fmt: skip
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    return plain(model, [fused(split), fused(whole)], [step[0] for step in held], losses)


def attend(layer: Attention, x: Tensor) -> Tensor:
    """The layer's forward for however many heads its projections give here."""
    n, t, _ = x.shape
    q, k, v = layer.query_key_value(x).view(n, t, 3, -1, layer.head_width).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return layer.output(y.transpose(1, 2).reshape(n, t, -1))


def by_heads(layer: nn.Linear, mesh: DeviceMesh) -> None:
    """Reorder the rows of a joint projection to queries, keys and values so that an even part has whole heads."""
    with torch.no_grad():
        for p in layer.parameters():
            rows = p.view(3, mesh.size(), -1, *p.shape[1:]).transpose(0, 1)
            p.copy_(rows.reshape(p.shape))


def plain(model: nn.Module, optimizers: list[torch.optim.Optimizer], held: list[Batch], losses: list[Tensor]) -> Step:
    """The loop that one writes for a single device."""

    def step(t: int) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        found = loss(model(held[t][0]), held[t])
        found.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses[:] = [found.detach()]

    return step


class Half(nn.Module):
    """The first or the second half of the model."""

    def __init__(self, model: nn.Module, first: bool) -> None:
        super().__init__()
        middle = len(model.blocks) // 2
        self.blocks = model.blocks[:middle] if first else model.blocks[middle:]
        self.front = nn.ModuleList([model.tokens, model.positions] if first else [])
        self.back = nn.Sequential(*([] if first else [model.norm, model.head]))

    def forward(self, x: Tensor) -> Tensor:
        if self.front:
            tokens, positions = self.front
            x = tokens(x) + positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.back(x)


def pipeline(asked: argparse.Namespace, held: list[list[Batch]], losses: list[Tensor]) -> Step:
    """`Schedule1F1B` over two halves."""
    me, count = dist.get_rank(), dist.get_world_size()
    model = Half(built(asked.model), first=me == 0)
    optimizer = fused(model.parameters())
    stage = PipelineStage(model, me, count, torch.device("cpu"))
    schedule = Schedule1F1B(stage, len(held[0]), loss_fn=lambda output, target: loss(output, (output, target)))
    whole = [tuple(torch.cat(each) for each in zip(*step)) for step in held]

    def step(t: int) -> None:
        optimizer.zero_grad()
        inputs, targets = whole[t]
        some: list[Tensor] = []
        if me == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=some)
        optimizer.step()
        losses[:] = [one.detach() for one in some]

    return step


WAYS: dict[str, Way] = {"fsdp": fsdp, "tensor": tensor, "pipeline": pipeline}
