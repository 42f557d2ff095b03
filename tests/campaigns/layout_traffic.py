"""Compares the bytes that `unisono layout` estimates with those that cross the loopback interface.

As root: ``python -m tests.campaigns.layout_traffic``. Runs in a network namespace without other traffic. The measured
bytes include TCP headers and the workers' own messages.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tests.campaigns.layout_memory import foretold
from tests.support import processes
from tests.support.training_runs import _worker, source
from unisono.trainer.micro_batches import MicroBatchRunner
from unisono.trainer.pipeline_runner import PipelineRunner

TASK = source("text", text=("README.md",), model={"layers": 2, "width": 256, "heads": 4, "context": 64})
CASES: list[tuple[str, Mapping[str, Any]]] = [
    ("Layout(shard=2)", {"global_batch": 8, "micro_batch": 4}),
    ("Layout(tensor=2)", {"global_batch": 4, "micro_batch": 4}),
    ("Layout(context=2)", {"global_batch": 4, "micro_batch": 4}),
    ("Layout(pipeline=2)", {"global_batch": 16, "micro_batch": 4}),
]
WORKERS = 2
MOST = 0.01  # that may differ


def sent() -> int:
    """Bytes that have left the loopback of this network."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
    return int(line.partition(":")[2].split()[8])


def measured(layout: str, settings: Mapping[str, Any]) -> float:
    """The median of a step, of all workers together."""
    told = {"threads": 1, "steps": 6, "workers": WORKERS, "layout": layout, **settings}
    with tempfile.TemporaryDirectory() as place:
        Path(place, "run").mkdir()
        steps = processes.run(WORKERS, _watched, TASK, told, Path(place, "run"), place, timeout_seconds=120)[0]
    return median(after - before for before, after in pairwise(steps[1:]))


def _watched(rank: int, size: int, *arguments: Any) -> list[int]:
    seen: list[int] = []
    for kind in (MicroBatchRunner, PipelineRunner):

        def watch(self: MicroBatchRunner, *given: Any, compute: Any = kind.run) -> None:
            self.replica._groups.world.gather(torch.zeros(1)).wait()  # all are between the same two steps
            seen.append(sent())
            compute(self, *given)

        kind.run = watch  # type: ignore[method-assign]
    _worker(rank, size, *arguments)
    return seen


def main() -> int:
    wrong = 0
    for layout, settings in CASES:
        holdings = foretold(TASK, WORKERS, layout, settings)
        expected = sum(each["bytes"] for holding in holdings for each in holding["messages"])
        ratio = measured(layout, settings) / expected
        wrong += abs(ratio - 1) > MOST
        print(f"{layout}: {expected:,} bytes of a step foretold, {ratio:.4f} of that measured", flush=True)
    return wrong


if __name__ == "__main__":
    if "alone" in sys.argv:
        sys.exit(main())
    inside = f"ip link set lo up && exec {sys.executable} -m tests.campaigns.layout_traffic alone"
    sys.exit(subprocess.run(["unshare", "-n", "sh", "-c", inside], env=os.environ, check=False).returncode)
