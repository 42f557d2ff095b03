"""What each worker of a layout holds, and its peak memory, measured inside one run of `unisono.train`.

With ``--groups``, every worker enters a control group of its own before its model is built, which may limit its memory.
Every worker writes what it holds at its last optimizer step; rank 0 reports.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import WorkerFailed
from unisono.layout import Layout
from unisono.notation import parse
from unisono.tasks.builtin.gpt import GPT

CONTEXT = 32  # bytes: activations weigh little beside the model
STEPS = 3  # the optimizer has state from the second step on


@dataclass(frozen=True)
class MemoryGroup:
    """The parent of a worker's control group (empty: none), and the limit of its memory (0: none)."""

    groups: str
    limit_bytes: int

    def enter(self) -> None:
        """From now on the kernel accounts the memory of this process, and kills it above the limit."""
        if self.groups:
            group = Path(self.groups, str(os.getpid()))
            group.mkdir()
            if self.limit_bytes:
                (group / "memory.limit_in_bytes").write_text(str(self.limit_bytes))
            (group / "cgroup.procs").write_text(str(os.getpid()))


def build(shape: GPT, memory_group: MemoryGroup) -> nn.Module:
    """The model, built after this process has entered its control group."""
    memory_group.enter()
    return shape.build()


def optimizer(parameters: Iterable[nn.Parameter], folder: str) -> Optimizer:
    """Fused AdamW, which writes down at its last step what this process holds."""
    made, steps = AdamW(parameters, lr=1e-4, fused=True), count(1)

    def look(*_: Any) -> None:
        if next(steps) == STEPS:
            Path(folder, f"{os.getpid()}.json").write_text(json.dumps(held(made)))

    made.register_step_post_hook(look)
    return made


def held(made: Optimizer) -> dict[str, int]:
    """Bytes of what is trained here, of its gradients and its optimizer state, and of all tensors there are."""
    parameters = [p for group in made.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [x for s in made.state.values() for x in s.values() if isinstance(x, Tensor)]
    there = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    return {
        "parameters": weigh(parameters),
        "gradients": weigh(gradients),
        "optimizer": weigh(state),
        "tensors": weigh([*there, *parameters, *gradients, *state]),
    }


def weigh(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that tensors lie in, each once."""
    return sum(nbytes for _, nbytes in set(_storages(tensors)))


def _storages(tensors: Iterable[Any]) -> Iterator[tuple[int, int]]:
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.device.type == "cpu" and local.layout is torch.strided:
            yield local.untyped_storage().data_ptr(), local.untyped_storage().nbytes()


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def train(asked: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The report: what the workers held, the most memory that one of them ever had, the loss; or how one failed."""
    shape = GPT(layers=asked.layers, width=asked.width, heads=4, context=CONTEXT)
    tokens = torch.randint(256, (64, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    task = unisono.Task(
        model=functools.partial(build, shape, MemoryGroup(asked.groups, asked.limit_bytes)),
        data=TensorDataset(tokens[:, :-1], tokens[:, 1:]),
        loss=loss,
        optimizer=functools.partial(optimizer, folder=folder),
    )
    layout = parse("layout", asked.layout, {"Layout": Layout})
    config = unisono.Config(
        workers=layout.workers,
        layout=layout,
        steps=STEPS,
        global_batch=4,
        micro_batch=1,
        threads=1,
        run_dir=f"{folder}/run",
        memory_checkpoints=False,  # of other workers' parts, which are no part of the layout
    )
    try:
        result = unisono.train(task, config, quiet=True)
    except WorkerFailed as failed:
        return {"failed": failed.reason}
    assert result is not None  # None only in a worker
    figures = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
    # Before the workers start, the optimizer is tried on small tensors in another process.
    workers = sorted(figures, key=lambda each: int(each["parameters"]))[-layout.workers :]
    return {"loss": result.loss, "peak_rss_bytes": result.peak_rss_bytes, "workers": workers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", default="Layout()")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--groups", default="", help="a control group under which each worker makes its own")
    parser.add_argument("--limit-bytes", type=int, default=0, help="of each worker, from before its model is built")
    parser.add_argument("--report", type=Path, required=True)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asked.report.write_text(json.dumps(train(asked, folder)))


if __name__ == "__main__":
    sys.exit(main())
