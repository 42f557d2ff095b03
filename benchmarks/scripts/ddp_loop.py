"""One training loop for three ways of distributing it; only `distribute` differs.

Started alone (``plain``), by torchrun (``ddp``) or by ``unisono launch`` (``unisono``). The model, the optimizer, the
batches in memory and the loop are the same for all three. Rank 0 writes a report.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCHES = 16  # distinct batches in memory, used in turn
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
    if way == "ddp":
        torch.distributed.init_process_group("gloo")
        return torch.distributed.get_rank(), nn.parallel.DistributedDataParallel(model), optimizer, leave_ddp
    if way == "unisono":
        import unisono

        world = unisono.join()
        return world.rank, *world.bind(model, optimizer), world.close
    return 0, model, optimizer, lambda: None


def leave_ddp() -> None:
    """gloo's destructor waits for its threads under the interpreter's lock, where one run in a few hangs."""
    torch.distributed.destroy_process_group()
    os._exit(0)


def main() -> None:
    asked = arguments()
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
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        marks.append(time.monotonic())

    if rank == 0 and asked.report:
        timed = [b - a for a, b in pairwise(marks[asked.warmup :])]
        report = {
            "step_seconds_median": statistics.median(timed),
            "step_seconds_mean": statistics.mean(timed),
            "first_step_at_seconds": marks[1],
            "loss": float(losses[min(CHECKED_STEP, len(losses) - 1)]),
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        asked.report.write_text(json.dumps(report))
    leave()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("plain", "ddp", "unisono"))
    parser.add_argument("--model", choices=("mlp", "gpt"), default="mlp")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--batch", type=int, default=32, help="samples per worker and step")
    parser.add_argument("--warmup", type=int, default=0, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=1, help="timed steps")
    parser.add_argument("--report", type=Path, help="where rank 0 writes what it measured")
    return parser.parse_args()


if __name__ == "__main__":
    main()
