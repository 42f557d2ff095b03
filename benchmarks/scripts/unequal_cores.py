"""A small GPT trained by workers with unequal shares of a core: alone, by DDP, or by `unisono.train`.

Every worker enters a control group before its model is built, in order of arrival. All ways have the same model,
optimizer, windows in memory and micro-batches. The clock is read at each optimizer step.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils.data import TensorDataset

import unisono
from unisono.compress import COMPRESSORS
from unisono.notation import parse
from unisono.tasks.builtin.gpt import GPT

CONTEXT = 64  # bytes
WINDOWS = 4096
PERIOD_MICROSECONDS = 10_000  # of the quotas: short against a micro-batch


def enter(groups: str, quotas: str) -> None:
    """Limits this process to the share of a core of the first free entry of `quotas`."""
    for place, cores in enumerate(quotas.split(",") if groups else ()):
        with contextlib.suppress(FileExistsError):
            group = Path(groups, str(place))
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (group / "cpu.cfs_quota_us").write_text(str(round(float(cores) * PERIOD_MICROSECONDS)))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            return


def build(groups: str, quotas: str) -> nn.Module:
    """The model, built after this process has entered its control group."""
    enter(groups, quotas)
    torch.manual_seed(0)
    return GPT(layers=4, width=128, heads=4, context=CONTEXT).build()


def windows() -> TensorDataset:
    tokens = torch.randint(256, (WINDOWS, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def optimizer(parameters: Iterable[nn.Parameter], folder: str) -> Optimizer:
    """Fused AdamW, which writes down when it steps."""
    made = AdamW(parameters, lr=1e-4, fused=True)
    file = open(Path(folder, f"{os.getpid()}.marks"), "a", buffering=1)  # noqa: SIM115 (kept as long as the process)
    made.register_step_post_hook(lambda *_: print(time.monotonic(), file=file))
    return made


def by_hand(asked: argparse.Namespace, folder: str) -> dict[str, Any]:
    """A plain loop, on one worker or with DDP; each worker computes an equal part of every global batch."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if asked.way == "ddp":
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = build(asked.groups, asked.quotas)
    steps = optimizer(model.parameters(), folder)
    called = nn.parallel.DistributedDataParallel(model) if asked.way == "ddp" else model
    data, count = windows().tensors, asked.micro_batches // size
    for _ in range(asked.steps):
        steps.zero_grad()
        for i in range(count):
            rows = torch.randint(WINDOWS, (asked.micro_batch,))
            batch = [each[rows] for each in data]
            quiet = asked.way == "ddp" and i + 1 < count
            with called.no_sync() if quiet else contextlib.nullcontext():
                (loss(called(batch[0]), batch) / count).backward()
        steps.step()
    return {}


def ours(asked: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The same by `unisono.train`."""
    task = unisono.Task(
        model=functools.partial(build, asked.groups, asked.quotas),
        data=windows,
        loss=loss,
        optimizer=functools.partial(optimizer, folder=folder),
    )
    config = unisono.Config(
        workers=len(asked.quotas.split(",")),
        steps=asked.steps,
        global_batch=asked.micro_batches * asked.micro_batch,
        micro_batch=asked.micro_batch,
        compress=parse("compress", asked.compress, COMPRESSORS),
        balance=asked.balance,
        threads=1,
        run_dir=f"{folder}/run",
    )
    result = unisono.train(task, config, quiet=True)
    assert result is not None  # None only in a worker
    events = [json.loads(line) for line in Path(folder, "run", "events.jsonl").read_text().splitlines()]
    shares = [{"step": e["step"], "micro_batches": e["micro_batches"]} for e in events if e["event"] == "shares"]
    return {"weights_sha256": result.weights_sha256, "shares": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("alone", "ddp", "unisono"))
    parser.add_argument("--groups", default="", help="a control group under which each worker makes its own")
    parser.add_argument("--quotas", required=True, help="cores that each worker may use, with commas between")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--timed", type=int, required=True, help="steps at the end that count")
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--compress", default="Cast()")
    parser.add_argument("--balance", default="auto")
    parser.add_argument("--report", type=Path, required=True)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = (ours if asked.way == "unisono" else by_hand)(asked, folder)
        marks = [float(line) for line in next(Path(folder).glob("*.marks")).read_text().splitlines()]
    samples = asked.timed * asked.micro_batches * asked.micro_batch
    report["samples_per_second"] = samples / (marks[-1] - marks[-1 - asked.timed])
    if os.environ.get("RANK", "0") == "0":
        asked.report.write_text(json.dumps(report))
    if asked.way == "ddp":
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # gloo's destructor hangs in one run of a few


if __name__ == "__main__":
    main()
