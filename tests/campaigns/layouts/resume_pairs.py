"""Every layout resumes from the checkpoint of every other, with equal losses and bit-equal weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from tests.support.layout_runs import Run, run
from unisono.checkpoint import fingerprint_of, open_checkpoint

SAVED, STEPS = 5, 9
TASK = {"optimizer": "adamw", "dropout": 0.1, "noise": 0.1, "pause": SAVED}  # random numbers in the model and the data
WAYS = (
    (1, "Layout()"),
    (2, "Layout(shard=2)"),
    (4, "Layout(shard=4)"),
    (2, "Layout(tensor=2)"),
    (2, "Layout(pipeline=2)"),
    (4, "Layout(pipeline=4)"),
    (2, "Layout(context=2)"),
    (4, "Layout(shard=2, tensor=2)"),
    (4, "Layout(shard=2, pipeline=2)"),
    (4, "Layout(tensor=2, pipeline=2)"),
    (4, "Layout(shard=2)"),
)
Way = tuple[int, str]


@dataclass(frozen=True)
class Pair:
    """Saved under one layout, gone on with under another."""

    saved: Way
    loaded: Way

    def __str__(self) -> str:
        return f"saved by {show(self.saved)}, loaded by {show(self.loaded)}"


def show(way: Way) -> str:
    """A layout and its workers."""
    return f"{way[1]} on {way[0]}"


def pairs() -> Iterator[Pair]:
    """All of them."""
    for saved, loaded in product(WAYS, WAYS):
        yield Pair(saved, loaded)


@dataclass
class Resumed:
    """Runs pairs in directory `path`; what a layout saves it saves once."""

    path: Path
    _runs: dict[str, Run] = field(default_factory=dict)

    def differs(self, pair: Pair) -> tuple[float, bool]:
        """By how much at most the losses after `SAVED` differ from those of one worker that was never stopped; and
        whether the weights that the second life saved are those that it found. Its first step learns nothing."""
        here = self.path / f"{len(list(self.path.iterdir()))}"
        saved = self._saved(pair.saved)
        shutil.copytree(saved, here)
        on = self._train(pair.loaded, here, STEPS, resume=True)
        whole = self._once("undisturbed", WAYS[0], STEPS)
        assert on.losses.keys() == set(range(SAVED + 1, STEPS + 1))
        found = {weights(saved, SAVED), weights(here, SAVED + 1)}
        shutil.rmtree(here)
        return max(abs(on.losses[step] - whole.losses[step]) for step in on.losses), len(found) == 1

    def _saved(self, way: Way) -> Path:
        name = show(way)
        told = self._once(name, way, SAVED).weights
        assert told == weights(self.path / name, SAVED)
        return self.path / name

    def _once(self, name: str, way: Way, steps: int) -> Run:
        if name not in self._runs:
            self._runs[name] = self._train(way, self.path / name, steps)
        return self._runs[name]

    def _train(self, way: Way, path: Path, steps: int, **settings: Any) -> Run:
        workers, layout = way
        given = {
            "layout": layout,
            "steps": steps,
            "checkpoint_every": 1,
            "keep_checkpoints": STEPS,
            "run_dir": str(path),
        }
        return run("odd", TASK, workers, path, **given, **settings)


def weights(path: Path, step: int) -> str:
    """The hash of what the run in `path` saved after `step` steps."""
    (found,) = (path / "checkpoints").glob(f"*{step:0>4}")
    return fingerprint_of(open_checkpoint(found))
