"""The micro-batch plan: every sample once per epoch, with any batch size."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data import MicroBatchPlan, default_micro_batch
from unisono.errors import InvalidInput


def all_indices(plan, steps):
    return [i for step in range(steps) for m in range(plan.micro_batches) for i in plan.indices(step, m).tolist()]


@settings(max_examples=60)
@given(micro=st.integers(1, 8), per_step=st.integers(1, 6), extra=st.integers(0, 40), seed=st.integers(0, 2**40))
def test_every_epoch_has_every_sample_once_also_where_a_batch_lies_across(micro, per_step, extra, seed):
    batch = micro * per_step
    plan = MicroBatchPlan(batch + extra, batch, micro, seed)
    steps = 3 * plan.samples // batch
    order = all_indices(plan, steps)
    for epoch in range(len(order) // plan.samples):
        part = order[epoch * plan.samples : (epoch + 1) * plan.samples]
        assert sorted(part) == list(range(plan.samples))


def test_epochs_differ_and_the_micro_batch_does_not_change_the_order():
    plan = MicroBatchPlan(30, 10, 5, seed=3)
    order = all_indices(plan, 6)
    assert order[:30] != order[30:]
    assert order == all_indices(MicroBatchPlan(30, 10, 2, seed=3), 6)
    assert order != all_indices(MicroBatchPlan(30, 10, 5, seed=4), 6)


def test_positions_follow_each_other():
    plan = MicroBatchPlan(100, 12, 4)
    positions = [p for step in range(3) for m in range(plan.micro_batches) for p in plan.positions(step, m)]
    assert positions == list(range(36))
    for step, micro_batch in ((-1, 0), (0, 3), (0, -1)):
        with pytest.raises(ValueError, match="below 3"):
            plan.positions(step, micro_batch)


def test_a_million_million_samples_and_a_late_step():
    indices = MicroBatchPlan(10**12, 2**20, 64, seed=1).indices(10**9, 7)
    assert len(set(indices.tolist())) == 64
    assert 0 <= indices.min() <= indices.max() < 10**12


@pytest.mark.parametrize(
    ("epochs", "steps"), [(1, 14), (2, 28), (0.5, 7), (0.001, 1), (3, 42), (0.9999, 14), (1.07, 15)]
)
def test_steps_in(epochs, steps):
    assert MicroBatchPlan(900, 64, 16).steps_in(epochs) == steps


def test_samples_that_no_step_reaches_are_counted():
    plan = MicroBatchPlan(45, 8)
    assert plan.left_out(1) == (
        "epochs = 1: the last 5 of 45 samples are not used, since 5 steps of 8 samples take 40; "
        "write steps = 6, or choose a global_batch that divides 45"
    )
    assert "the last 2 of 90 samples" in plan.left_out(2.0)
    assert "the last 6 of 22 samples" in plan.left_out(0.5)
    assert [plan.left_out(epochs) for epochs in (8, 0.01, 16 / 45)] == ["", "", ""]


def test_epoch_of():
    plan = MicroBatchPlan(10, 4, 2)
    assert [plan.epoch_of(step) for step in range(6)] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("global_batch", "micro_batch"),
    [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (7, 1), (10, 2), (18, 3), (64, 16)],
)
def test_default_micro_batch(global_batch, micro_batch):
    assert default_micro_batch(global_batch) == micro_batch
    assert MicroBatchPlan(100, global_batch).micro_batch == micro_batch


def test_a_plan_is_a_value():
    assert MicroBatchPlan(100, 64) == MicroBatchPlan(100, 64, 16, seed=0)
    assert Counter([MicroBatchPlan(100, 64), MicroBatchPlan(100, 64)])[MicroBatchPlan(100, 64)] == 2
    with pytest.raises(AttributeError):
        MicroBatchPlan(100, 64).seed = 1


@pytest.mark.parametrize(
    ("arguments", "field", "value", "parts"),
    [
        ((100, 64, 10), "micro_batch", 10, ["global_batch = 64", "micro_batch=8 or 16", "global_batch=70"]),
        ((100, 64, 100), "micro_batch", 100, ["micro_batch=64"]),
        ((100, 64, 0), "micro_batch", 0, ["below 1", "micro_batch=1"]),
        ((50, 64, 16), "global_batch", 64, ["50 samples", "at most 50"]),
        ((0, 64, 16), "data", 0, ["no samples"]),
        ((10, 0, 1), "global_batch", 0, ["1 to 10"]),
    ],
)
def test_what_cannot_work_is_named_with_its_cure(arguments, field, value, parts):
    with pytest.raises(InvalidInput) as error:
        MicroBatchPlan(*arguments)
    assert (error.value.field, error.value.value) == (field, value)
    for part in parts:
        assert part in str(error.value)
