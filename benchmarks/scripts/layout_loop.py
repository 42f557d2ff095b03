"""A model on two workers, under a layout of ours or under torch's own parallelism.

``unisono`` is the whole of `unisono.train` with a layout. ``fsdp``, ``tensor`` and ``pipeline`` are started by
torchrun: plain loops that use one part of torch each (`torch_layouts.py`). Initial weights, order of samples and fused
optimizer are the same for all (`timed_model.py`). Rank 0 writes a report.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from pathlib import Path

import torch

import unisono
from unisono.layout import Layout
from unisono.notation import parse

sys.path.insert(0, str(Path(__file__).parent))
from timed_model import MODELS, Samples, fused, loss, together


def ours(asked: argparse.Namespace) -> dict[str, float]:
    """`unisono.train` under the layout."""
    task = unisono.Task(
        model=MODELS[asked.model].build,
        data=functools.partial(Samples, asked.model),
        loss=loss,
        optimizer=fused,
        collate=together,
    )
    layout = parse("layout", asked.layout, {"Layout": Layout})
    with tempfile.TemporaryDirectory() as folder:
        result = unisono.train(
            task,
            unisono.Config(
                workers=layout.workers, layout=layout, steps=asked.steps, global_batch=asked.global_batch,
                micro_batch=asked.micro_batch, threads=1, run_dir=f"{folder}/run"), quiet=True)  # fmt: skip
    assert result is not None  # None only in a worker
    return {"step_seconds_median": result.step_seconds_median, "loss": result.loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("unisono", "fsdp", "tensor", "pipeline"))
    parser.add_argument("--model", choices=list(MODELS), default="gpt")
    parser.add_argument("--layout", default="Layout()")
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--report", type=Path, required=True)
    asked = parser.parse_args()
    if asked.way == "unisono":
        asked.report.write_text(json.dumps(ours(asked)))
        return
    import torch_layouts

    report = torch_layouts.train(asked)
    if torch.distributed.get_rank() == 0:
        asked.report.write_text(json.dumps(report))
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's destructor waits for its threads under the interpreter's lock


if __name__ == "__main__":
    main()
