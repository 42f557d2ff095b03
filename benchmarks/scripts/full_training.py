"""``unisono.train`` on one worker or several, and a plain loop over a `DataLoader`.

Both have the same task: model, loss, fused optimizer and dataset. What `unisono.train` does besides in a step
(records, checks, figures of the display) is measured too.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono.compress import COMPRESSORS
from unisono.notation import parse

sys.path.insert(0, str(Path(__file__).parent))
import ddp_loop

SAMPLES = 4096


def dataset(model: str) -> TensorDataset:
    """`SAMPLES` inputs and targets in memory."""
    torch.manual_seed(0)
    return TensorDataset(*ddp_loop.batch(model, SAMPLES))


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten())


def plain(asked: argparse.Namespace) -> float:
    """Median seconds of a step, fetching included."""
    torch.set_num_threads(1)
    model = ddp_loop.build(asked.model)
    optimizer = ddp_loop.fused(model.parameters())
    loader = DataLoader(dataset(asked.model), asked.batch, shuffle=True, drop_last=True)
    marks: list[float] = []
    while len(marks) <= asked.steps:
        for batch in loader:
            marks.append(time.monotonic())
            optimizer.zero_grad()
            loss(model(batch[0]), batch).backward()
            optimizer.step()
            if len(marks) > asked.steps:
                break
    return statistics.median(b - a for a, b in pairwise(marks))


def ours(asked: argparse.Namespace) -> dict[str, float]:
    """The same figure of `unisono.train`, and steps per second of all of its steps."""
    task = unisono.Task(
        model=functools.partial(ddp_loop.build, asked.model),
        data=functools.partial(dataset, asked.model),
        loss=loss,
        optimizer=ddp_loop.fused,
    )
    sizes = {"global_batch": asked.workers * asked.batch, "micro_batch": asked.batch}
    elastic = asked.elastic == "on"
    config = unisono.Config(
        workers=asked.workers, elastic=elastic, steps=asked.steps, threads=1, run_dir="run",
        compress=parse("compress", asked.compress, COMPRESSORS), **sizes)  # fmt: skip
    result = unisono.train(task, config, quiet=True)
    assert result is not None  # None only in a worker
    steps_per_second = result.samples_per_second / sizes["global_batch"]
    return {"step_seconds_median": result.step_seconds_median, "steps_per_second": steps_per_second}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("plain", "unisono"))
    parser.add_argument("--model", choices=("mlp", "gpt"), default="mlp")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1, help="of unisono")
    parser.add_argument("--elastic", choices=("on", "off"), default="on", help="whether they may come and go")
    parser.add_argument("--compress", default="Cast()", help="of unisono")
    parser.add_argument("--report", type=Path, required=True)
    asked = parser.parse_args()
    found = {"step_seconds_median": plain(asked)} if asked.way == "plain" else ours(asked)
    asked.report.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
