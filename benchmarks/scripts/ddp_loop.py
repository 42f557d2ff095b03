"""One training loop for all ways of distributing it; only `distribute` differs.

Started alone (``plain``), by torchrun (``ddp``, ``drop-in``) or by ``unisono launch`` (``unisono``, ``horovod``). The
model, the optimizer, the batches in memory and the loop are the same for all. Rank 0 writes a report.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCHES = 16  # distinct batches in memory, used in turn
WAYS = ("plain", "ddp", "drop-in", "unisono", "horovod")
CHECKED_STEP = 10  # whose loss is reported, so that a way that computes something else is found out


def build(model: str) -> nn.Module:
    """``mlp``: four linear layers, 256 wide; ``gpt``: about 10M parameters."""
    if model == "mlp":
        layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(256, 256))
    from unisono.tasks.builtin.gpt import GPT

    return GPT(layers=12, width=256, heads=4, context=128).build()


def batch(model: str, size: int) -> tuple[Tensor, Tensor]:
    """Inputs and integer targets of a batch of `size` samples."""
    if model == "mlp":
        return torch.randn(size, 256), torch.randint(256, (size,))
    tokens = torch.randint(256, (size, 65))
    return tokens[:, :-1], tokens[:, 1:]


def fused(parameters: Iterable[nn.Parameter], name: str = "adamw") -> torch.optim.Optimizer:
    """The fused optimizer of that name."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, fused=True)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def distribute(
    way: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """The lines that differ: this worker's rank, what the loop is to use, and how to leave."""
    if way in ("ddp", "drop-in"):  # which differ by this import
        if way == "ddp":
            from torch.nn.parallel import DistributedDataParallel
        else:
            from unisono import DistributedDataParallel

        torch.distributed.init_process_group("gloo")
        return torch.distributed.get_rank(), DistributedDataParallel(model), optimizer, leave_ddp
    if way == "unisono":
        import unisono

        world = unisono.join()
        return world.rank, *world.bind(model, optimizer), world.close
    if way == "horovod":
        import unisono.horovod as hvd

        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return hvd.rank(), model, optimizer, hvd.shutdown
    return 0, model, optimizer, lambda: None


def leave_ddp() -> None:
    """gloo's destructor waits for its threads under the interpreter's lock, where one run in a few hangs."""
    torch.distributed.destroy_process_group()
    os._exit(0)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy over all positions."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def main() -> None:
    asked = arguments(__doc__, WAYS)
    torch.manual_seed(0)
    model = build(asked.model)
    optimizer = fused(model.parameters(), asked.optimizer)
    rank, model, optimizer, leave = distribute(asked.way, model, optimizer)
    torch.set_num_threads(1)
    torch.manual_seed(1 + rank)
    batches = [batch(asked.model, asked.batch) for _ in range(BATCHES)]

    marks, losses = [time.monotonic()], []
    for step in range(asked.warmup + asked.steps):
        inputs, targets = batches[step % BATCHES]
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        marks.append(time.monotonic())

    if rank == 0 and asked.report:
        write_report(asked, marks, losses, model)
    leave()


def write_report(asked: argparse.Namespace, marks: Sequence[float], losses: Sequence[Tensor], model: nn.Module) -> None:
    """Writes what a benchmark reads.

    Args:
        marks: seconds at the beginning, and at the end of each step.
        losses: of each step.
    """
    timed = [b - a for a, b in pairwise(marks[asked.warmup :])]
    report = {
        "step_seconds_median": statistics.median(timed),
        "step_seconds_mean": statistics.mean(timed),
        "first_step_at_seconds": marks[1],
        "loss": float(losses[min(CHECKED_STEP, len(losses) - 1)]),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    asked.report.write_text(json.dumps(report))


def arguments(description: str | None, ways: Sequence[str]) -> argparse.Namespace:
    """The options of a script that has these ways."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("way", choices=ways)
    parser.add_argument("--model", choices=("mlp", "gpt"), default="mlp")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--batch", type=int, default=32, help="samples per worker and step")
    parser.add_argument("--warmup", type=int, default=0, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=1, help="timed steps")
    parser.add_argument("--report", type=Path, help="where rank 0 writes what it measured")
    return parser.parse_args()


if __name__ == "__main__":
    main()
