"""Bad steps are dropped alike by all workers, and named; replicas that differ are healed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.lives import Life, live, lived
from tests.training import regression
from unisono import Task
from unisono.data import MicroBatchPlan
from unisono.errors import Diverged
from unisono.trainer import Trainer

PLAN = MicroBatchPlan(96, 24, 4, 0)  # of `regression`
STEPS = 8


def places(sample: int) -> list[tuple[int, int]]:
    """Steps and micro-batches that a sample comes in."""
    return [(t, m) for t in range(STEPS) for m in range(6) if sample in PLAN.indices(t, m)]


def told(life: Life, event: str = "bad step") -> list[Any]:
    return [each for each in life.events if each["event"] == event]


# What is not finite.


@pytest.mark.parametrize("options", [{"norm": True, "dropout": 0.1}, {"norm": False}, {"optimizer": "sgd"}])
def test_a_planted_sample_drops_the_same_steps_for_any_number_of_workers(options, tmp_path) -> None:
    task = regression(hidden_nan_at=11, **options)
    lives = [lived(n, task, tmp_path / str(n), bad_step="Skip()") for n in (1, 2, 3)]
    assert {life.skipped for life in lives} == {tuple(t for t, _ in places(11))}
    assert len({life.weights for life in lives}) == 1
    assert all(math.isfinite(life.loss) for life in lives)
    events = told(lives[2])
    for (t, m), event in zip(places(11), events, strict=True):
        assert (event["step"], event["micro_batches"], event["workers"]) == (t, [m], [m // 2])
        assert event["samples"] == PLAN.indices(t, m).tolist()
        assert "of which 11 holds what is not finite" in event["words"]


@pytest.mark.parametrize("compress", ["Cast()", "Exact()", "OneBit()"])
@pytest.mark.parametrize("sync", ["AllReduce()", "ParameterServer()"])
def test_nothing_of_a_dropped_step_is_left_under_any_synchronizer_and_compressor(sync, compress, tmp_path) -> None:
    """Weights, buffers and the optimizer's state are the bits that they were before it."""
    bad, seen = places(11)[0][0], {}

    def look(rank: int, done: int, trainer: Trainer) -> None:
        trainer.replica.need()
        seen[rank, done] = {name: tensor.clone() for name, tensor in trainer.replica.state.items()}

    task = regression(hidden_nan_at=11)
    life = lived(2, task, tmp_path, look, bad_step="Skip()", sync=sync, compress=compress, steps=bad + 2)
    assert life.skipped == (bad,)
    for rank in (0, 1):
        before, after, then = (seen[rank, done] for done in (bad, bad + 1, bad + 2))
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert not any(torch.equal(then[name], tensor) for name, tensor in before.items() if "weight" in name)


def steep(at: int) -> Task:
    """A finite loss whose gradient is not: that of a root at 0."""
    task = regression(norm=False)
    x, y = task.data.x, task.data.y

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        here = (batch[0] == x[at]).all(1, keepdim=True)
        return ((output - batch[1]) ** 2).mean() + torch.where(here, (output * 0).abs(), 1.0).sqrt().mean() - 1

    assert len(x) == len(y)
    return replace(task, loss=loss)


@pytest.mark.parametrize("compress", ["Cast()", "Exact()"])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_gradient_that_is_not_finite_is_found_where_the_loss_is_finite(workers, clip, compress, tmp_path) -> None:
    life = lived(workers, steep(11), tmp_path, bad_step="Skip()", compress=compress, clip=clip)
    assert life.skipped == tuple(t for t, _ in places(11))
    assert math.isfinite(life.loss)


def test_with_clip_a_gradient_that_is_not_finite_ends_a_run_that_stops(tmp_path) -> None:
    (found,) = live(1, steep(11), tmp_path, compress="Cast()", clip=1.0)
    assert isinstance(found, Diverged)
    assert f"the norm of the mean gradient is nan in step {places(11)[0][0]}" in str(found)
