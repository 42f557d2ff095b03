"""Tasks with slow steps while workers are being killed, which end after the last kill."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from tests.support import layout_models
from tests.support.tally import Tally
from unisono import Task

STEPS, LAST = 60, 6
"""Steps of a run, and how many of them are taken after the raid."""
SAMPLES, BATCH = 48, 24
FIRST = 14
"""Steps that are taken quickly before the first worker is killed."""
STEP_SECONDS, SLOW_SECONDS = 0.03, 0.4


def paced(over: str) -> Callable[[int, int], float]:
    """A schedule of constant factor 1. As long as there is no file `over`, a step takes a while, those that are not
    `allow`ed yet a long while, and the last ones are not begun: a raid finds steps to await however long it takes."""

    def factor(step: int, steps: int) -> float:
        while over and not Path(over).exists():
            time.sleep(STEP_SECONDS if step < _allowed(over) else SLOW_SECONDS)
            if step < steps - LAST:
                break
        return 1.0

    return factor


def allow(over: str, steps: int) -> None:
    """So many steps may be taken quickly before there is a file `over`."""
    file = Path(over).with_name("allowed")
    file.with_suffix(".new").write_text(str(steps))
    file.with_suffix(".new").rename(file)


def _allowed(over: str) -> int:
    file = Path(over).with_name("allowed")
    return int(file.read_text()) if file.exists() else FIRST


def gpt(*, over: str = "") -> Task:
    """The task of `tests.support.layout_models`."""
    return replace(layout_models.gpt(), schedule=paced(over), defaults={**layout_models.STEPS, "steps": STEPS})


def tally(*, over: str = "") -> Task:
    """At the end, each sample's number is how often it was learned from."""
    return Task(
        model=lambda: Tally(SAMPLES),
        data=TensorDataset(torch.arange(SAMPLES)), loss=lambda output, batch: -output.mean(),
        inputs=lambda batch: batch[0], optimizer=lambda parameters: torch.optim.SGD(parameters, lr=float(BATCH)),
        schedule=paced(over),
        defaults={"steps": STEPS, "global_batch": BATCH, "micro_batch": 4, "load": "Inline()"})  # fmt: skip
