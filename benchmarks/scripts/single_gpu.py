"""A GPT on one device, trained by `unisono.train`, by a plain loop, or by a transformers `Trainer`.

All have the same shape, random text, bf16 autocast, ``torch.compile`` and fused AdamW. Writes a report. The model
``tiny`` on a CPU is for trying the script itself.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unisono
from unisono.tasks.builtin.gpt import GPT, parameters

sys.path.insert(0, str(Path(__file__).parent))
from timed_model import Samples, fused, loss, together

SHAPES = {
    "tiny": GPT(layers=2, width=32, heads=2, context=16),
    "120m": GPT(layers=12, width=896, heads=14, context=1024),
    "1b": GPT(layers=20, width=2048, heads=16, context=1024),
}
WARMUP = 5  # steps, of which the first one compiles


class Text(Samples):
    """Random bytes (512, context) and those that follow."""

    def __init__(self, context: int) -> None:
        tokens = torch.randint(256, (512, context + 1), generator=torch.Generator().manual_seed(0))
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:]


def data(asked: argparse.Namespace) -> Text:
    return Text(SHAPES[asked.model].context)


def ours(asked: argparse.Namespace) -> float:
    """Seconds of the median step, of all but compilation, which the median leaves out."""
    task = unisono.Task(
        model=SHAPES[asked.model].build, data=functools.partial(data, asked), loss=loss, optimizer=fused,
        collate=together)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        result = unisono.train(
            task,
            unisono.Config(
                steps=asked.steps, global_batch=asked.batch, micro_batch=asked.batch, precision="bf16",
                compile=asked.compile, device=asked.device, threads=1,
                run_dir=f"{folder}/run"), quiet=True)  # fmt: skip
    assert result is not None  # None only in a worker
    return result.step_seconds_median


def plain(asked: argparse.Namespace) -> float:
    """The same figure of a loop."""
    device, samples = torch.device(asked.device), data(asked)
    model = SHAPES[asked.model].build().to(device)
    optimizer = fused(model.parameters())
    called = torch.compile(model) if asked.compile else model
    marks = []
    for step in range(asked.steps):
        at = [(step * asked.batch + i) % len(samples) for i in range(asked.batch)]
        batch = tuple(x.to(device) for x in samples.__getitems__(at))
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            found = loss(called(batch[0]), batch)
        found.backward()
        optimizer.step()
        float(found)  # waits for the device, as showing the loss does
        marks.append(time.monotonic())
    return median(marks)


def trainer(asked: argparse.Namespace) -> float:
    """The same figure of transformers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if asked.device != "cpu":
                torch.cuda.synchronize()
            marks.append(time.monotonic())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=asked.steps, per_device_train_batch_size=asked.batch, bf16=True,
            torch_compile=asked.compile, optim="adamw_torch_fused", learning_rate=1e-4, report_to=[],
            save_strategy="no", use_cpu=asked.device == "cpu", max_grad_norm=0.0, lr_scheduler_type="constant",
            disable_tqdm=True)  # fmt: skip
        model = WithLoss(SHAPES[asked.model].build())
        Trainer(model, arguments, train_dataset=data(asked), data_collator=named, callbacks=[Clock()]).train()
    return median(marks)


class WithLoss(nn.Module):
    """A model as the `Trainer` wants it: it computes its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": loss(self.model(input_ids), (input_ids, labels))}


def named(samples: Any) -> dict[str, Tensor]:
    """A batch by the names of `WithLoss.forward`."""
    inputs, targets = together(samples)
    return {"input_ids": inputs, "labels": targets}


def median(marks: list[float]) -> float:
    """Seconds of the median step after the first ones."""
    return statistics.median(b - a for a, b in pairwise(marks[min(WARMUP, len(marks) - 2) :]))


WAYS = {"unisono": ours, "plain": plain, "trainer": trainer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=list(WAYS))
    parser.add_argument("--model", choices=list(SHAPES), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--report", type=Path, required=True)
    asked = parser.parse_args()
    seconds = WAYS[asked.way](asked)
    shape = SHAPES[asked.model]
    with torch.device("meta"):
        count = parameters(shape.build())
    device = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    asked.report.write_text(
        json.dumps(
            {"step_seconds_median": seconds, "parameters": count, "device": device,
             "tokens_per_second": asked.batch * shape.context / seconds,
             "flops_per_token": 6 * count + 12 * shape.layers * shape.width * shape.context}))  # fmt: skip


if __name__ == "__main__":
    main()
