"""Compares the estimates of `unisono layout` with what real workers hold and send.

All cases, or those of at most WORKERS workers: ``python -m tests.campaigns.layout_memory [WORKERS]``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support import processes
from tests.support.training_runs import _worker, source
from unisono.config import Config
from unisono.elastic.model_state import state_of
from unisono.layout import LocalModel, RankMesh
from unisono.layout.accounting import CollectiveCounter, SavedTensors
from unisono.plan.layout_estimate import estimate_layout, traffic
from unisono.run.resolve import resolve_config
from unisono.tasks.source import NamedTask
from unisono.trainer.loop import Trainer
from unisono.trainer.micro_batches import MicroBatchRunner
from unisono.trainer.pipeline_runner import PipelineRunner

TEXT = source("text", text=(__file__,), model={"layers": 3, "width": 32, "heads": 2, "context": 16, "dropout": 0.0})
STILL = source("regression", optimizer="sgd", norm=False)
NORMED = source("regression", optimizer="adamw", dropout=0.1)
FACTORED = source("regression", optimizer="adafactor", norm=False)  # it needs tensors whole
EVEN = {"global_batch": 48, "micro_batch": 4}
CASES: list[tuple[str, int, NamedTask, Mapping[str, Any]]] = [
    ("Layout(shard=3)", 3, TEXT, {"global_batch": 24, "micro_batch": 4}),
    ("Layout(shard=2, tensor=2)", 4, TEXT, {"global_batch": 16, "micro_batch": 8}),
    ("Layout(shard=2, pipeline=2, cuts=('blocks.1',))", 4, TEXT, {"global_batch": 32, "micro_batch": 4}),
    ("Layout(pipeline=2, schedule='ZBVZeroBubble', cuts=('blocks.1', 'blocks.2', 'norm'))", 2, TEXT, {}),
    ("Layout(context=2)", 2, TEXT, {"precision": "bf16"}),
    ("Layout(shard=2)", 2, NORMED, EVEN),
    ("Layout(shard=2, tensor=2)", 4, FACTORED, EVEN),
]
MORE = [
    ("Layout(tensor=2)", 2, TEXT, {"global_batch": 8, "micro_batch": 8}),
    ("Layout(pipeline=2, cuts=('blocks.1',))", 2, TEXT, {}),
    ("Layout(pipeline=4, schedule='GPipe', cuts=('blocks.1', 'blocks.2', 'norm'))", 4, TEXT, {}),
    ("Layout(pipeline=2, schedule='Interleaved1F1B', cuts=('blocks.1', 'blocks.2', 'norm'))", 2, TEXT, {}),
    ("Layout(pipeline=2, schedule='DualPipeV', cuts=('blocks.1', 'blocks.2', 'norm'))", 2, TEXT, {}),
    ("Layout(pipeline=2, schedule='InterleavedZeroBubble', cuts=('blocks.1', 'blocks.2', 'norm'))", 2, TEXT, {}),
    ("Layout(shard=2, pipeline=2, schedule='LoopedBFS', cuts=('blocks.1', 'blocks.2', 'norm'))", 4, TEXT, {}),
    ("Layout(tensor=2, pipeline=2, cuts=('blocks.1',))", 4, TEXT, {}),
    ("Layout(shard=2, zero=1)", 2, TEXT, {"global_batch": 32, "micro_batch": 4}),
    ("Layout(shard=2, zero=2)", 2, TEXT, {"global_batch": 32, "micro_batch": 4}),
    ("Layout(replicate=2)", 2, TEXT, {}),
    ("Layout(replicate=2, shard=2)", 4, TEXT, {}),
    ("Layout(shard=2)", 2, TEXT, {"precision": "bf16_parameters"}),
    ("Layout(shard=2)", 2, TEXT, {"activation_checkpointing": "blocks"}),
    ("Layout(shard=2, context=2)", 4, TEXT, {}),
    ("Layout(context=2, tensor=2)", 4, TEXT, {"global_batch": 8, "micro_batch": 8}),
    ("Layout(shard=2)", 4, TEXT, {}),
    ("Layout(pipeline=2)", 2, STILL, EVEN),
    ("Layout(shard=4)", 4, STILL, EVEN),
]
HELD = ("parameters", "buffers", "gradients", "optimizer", "activations")


def foretold(task: NamedTask, workers: int, layout: str, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By worker."""
    laid: dict[str, Any] = processes.run(1, _foretold, task, {**settings, "layout": layout, "workers": workers})[0]
    return [next(each for each in laid["holdings"] if rank in each["workers"]) for rank in range(workers)]


def _foretold(rank: int, size: int, task: NamedTask, settings: Mapping[str, Any]) -> dict[str, Any]:
    found = task.load()
    return estimate_layout(found, resolve_config(found, settings)).mapping()


def seen(task: NamedTask, workers: int, layout: str, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By worker, of a real step: the second, as pipelines find out shapes in the first."""
    told = {"threads": 1, "steps": 2, "workers": workers, "layout": layout, **settings}
    with tempfile.TemporaryDirectory() as place:
        Path(place, "run").mkdir()
        arguments = (task, told, Path(place, "run"), place)
        return processes.run(workers, _watched, *arguments, timeout_seconds=120)


def _watched(rank: int, size: int, *arguments: Any) -> dict[str, Any]:
    """A worker that looks at itself while it trains."""
    found: dict[str, Any] = {}
    run, once = Trainer.run, {each: each.run for each in (MicroBatchRunner, PipelineRunner)}

    def watch_run(self: Trainer) -> Any:
        held, optimizer = self.replica.local, self.replica.optimizer

        def note(held: LocalModel, step: Any, take: Any = LocalModel.step) -> Any:
            found["gradients"] = sum(p.grad.nbytes for p in held.local.parameters() if p.grad is not None)
            return take(held, step)

        LocalModel.step = note  # type: ignore[method-assign]
        outcome = run(self)
        found["parameters"] = sum(p.nbytes for p in held.local.parameters())
        found["buffers"] = sum(b.nbytes for b in held.local.buffers())
        found["optimizer"] = sum(t.nbytes for t in state_of(optimizer, held.local)[0].values())
        return outcome

    def watch_step(self: MicroBatchRunner, t: int, mine: range, *given: Any) -> None:
        kept, messages = SavedTensors(), CollectiveCounter()
        with messages, kept.counting(self.model):
            once[type(self)](self, t, mine, *given)
        found["activations"] = kept.bytes / len(mine)
        found["messages"] = dict(messages.seen)

    Trainer.run = watch_run  # type: ignore[method-assign]
    for each in once:
        each.run = watch_step  # type: ignore[method-assign]
    _worker(rank, size, *arguments)
    return found


def compare(layout: str, workers: int, task: NamedTask, settings: Mapping[str, Any]) -> list[str]:
    """What differs, in words."""
    wrong, places = [], RankMesh(Config.of({"layout": layout}).layout, workers)
    expected, found = foretold(task, workers, layout, settings), seen(task, workers, layout, settings)
    for rank, (one, other) in enumerate(zip(expected, found, strict=True)):
        for key in HELD:
            # Under the tensor axis what is foretold of activations is up to 0.2 % more, which nobody has explained.
            loose = key == "activations" and "tensor" in layout
            if abs(one[key] - other[key]) > (2e-3 * one[key] if loose else 0):
                wrong.append(f"worker {rank}: {one[key]} bytes of {key} foretold, {other[key]} there")
        # What passes after the backward pass is not seen here.
        before = [m for m in one["messages"] if m["axes"] != "replica" and m["kind"] != "exchange"]
        messages = {(m["axes"], m["kind"]): [m["count"], m["bytes"]] for m in before}
        sent = traffic(other["messages"], places, "gloo")
        real = {(t.axes, t.kind): [t.count, t.bytes] for t in sent if t.axes != "replica"}
        if messages != real:
            wrong.append(f"worker {rank}: {messages} foretold, {real} sent")
    return wrong


def main(most_workers: int) -> int:
    wrong = 0
    for layout, workers, task, settings in [case for case in [*CASES, *MORE] if case[1] <= most_workers]:
        differences = compare(layout, workers, task, settings)
        wrong += bool(differences)
        about = layout, workers, task.name, dict(settings)
        print("wrong" if differences else "right", *about, *(f"\n  {each}" for each in differences), flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 4))
