"""Which steps count, as arithmetic: laws of the anomaly detector and of comparing replicas."""

from __future__ import annotations

import json
import math
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from unisono.bad_steps import (
    ENOUGH,
    NOT_REPRESENTABLE,
    REMEMBERED,
    AnomalyDetector,
    ReplicaMismatch,
    RollBack,
    Skip,
    Stop,
    find_mismatch,
)

LOSS = st.floats(-1e6, 1e6)
LOSSES = st.lists(LOSS, min_size=1, max_size=8)
NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf])
POLICY = st.sampled_from([Stop(), Skip(), Skip(spike=3), RollBack()])


def never() -> float:
    raise AssertionError("the norm was asked for")


@given(POLICY, LOSSES, NOT_FINITE, st.data())
def test_every_loss_that_is_not_finite_is_named_and_no_norm_is_computed_for_it(policy, losses, other, data) -> None:
    where = data.draw(st.sets(st.integers(0, len(losses) - 1), min_size=1))
    given = [other if m in where else loss for m, loss in enumerate(losses)]
    bad = AnomalyDetector(policy).inspect(7, given, math.nan, never)
    assert bad is not None
    assert (bad.step, bad.micro_batches) == (7, tuple(sorted(where)))
    assert str(other) in bad.why


@given(POLICY, LOSSES, NOT_FINITE, st.floats(0, 1e9))
def test_finite_losses_are_bad_only_by_their_gradient(policy, losses, other, norm) -> None:
    mean = statistics.fmean(losses)
    assert AnomalyDetector(policy).inspect(0, losses, mean, lambda: norm) is None
    bad = AnomalyDetector(policy).inspect(0, losses, mean, lambda: other)
    assert bad is not None
    assert bad.micro_batches == ()


def test_what_a_compressor_cannot_hold_is_not_said_to_be_a_loss() -> None:
    bad = AnomalyDetector(Skip()).inspect(0, [1.0, NOT_REPRESENTABLE], NOT_REPRESENTABLE, never)
    assert bad is not None
    assert "a gradient is too large for the compressor" in bad.why


@given(st.lists(LOSS, min_size=ENOUGH, max_size=2 * REMEMBERED), st.floats(0.5, 50), st.floats(0, 100))
def test_a_spike_lies_above_the_median_by_so_many_deviations_of_the_last_losses(past, spike, more) -> None:
    judge = AnomalyDetector(Skip(spike=spike))
    for loss in past:
        judge.record_good(loss)
    seen = past[-REMEMBERED:]
    median = statistics.median(seen)
    spread = 1.4826 * statistics.median([abs(loss - median) for loss in seen])
    bound = median + spike * max(spread, abs(median) / 100)
    assert judge.bound == pytest.approx(bound)
    assert judge.inspect(0, [judge.bound], judge.bound, lambda: 1.0) is None
    assume(judge.bound + more > judge.bound)
    bad = judge.inspect(0, [judge.bound, judge.bound + more], judge.bound + more, lambda: 1.0)
    assert bad is not None
    assert bad.micro_batches == (1,)


@given(st.lists(LOSS, max_size=ENOUGH - 1), LOSS)
def test_too_few_losses_make_no_spike(past, loss) -> None:
    judge = AnomalyDetector(Skip(spike=1e-3))
    for each in past:
        judge.record_good(each)
    assert judge.inspect(0, [loss], loss, lambda: 1.0) is None


@given(LOSS)
def test_few_outliers_do_not_make_others_pass(far) -> None:
    """A quarter of what is remembered may be anything: the bound stays within reach of the others."""
    judge, clean = AnomalyDetector(Skip(spike=5)), [1.0 + 0.01 * (i % 7) for i in range(3 * REMEMBERED // 4)]
    for each in [*clean, *[abs(far) + 1e3] * (REMEMBERED // 4)]:
        judge.record_good(each)
    assert judge.bound < 2


@given(st.lists(st.integers(0, 300), unique=True).map(sorted), st.integers(1, 5), st.integers(1, 50))
def test_the_limit_counts_bad_steps_within_so_many(steps, limit, within) -> None:
    judge = AnomalyDetector(Skip(limit=limit, within=within))
    for i, step in enumerate(steps):
        recent = sum(step - within < each <= step for each in steps[: i + 1])
        assert judge.too_many(step) == (recent if recent > limit else None)
        judge.record_bad(step)


@given(st.lists(LOSS, max_size=100), st.sets(st.integers(0, 99)), LOSS)
def test_what_a_judge_remembers_survives_as_json(losses, steps, last) -> None:
    judge, heir = AnomalyDetector(Skip(spike=4)), AnomalyDetector(Skip(spike=4))
    for loss in losses:
        judge.record_good(loss)
    for step in sorted(steps):
        judge.record_bad(step)
    judge.skip(steps)
    judge.healed = 3
    state = json.loads(json.dumps(judge.state()))
    heir.load(state)
    assert heir.state() == judge.state()
    assert heir.bound == judge.bound
    judge.skip([1000])
    judge.record_good(last)
    judge.load(state)  # of an earlier step: its losses count again, and what is bad stays so
    assert judge.bound == heir.bound
    assert judge.skipped == heir.skipped | {1000}


@given(st.dictionaries(st.integers(0, 20), st.sampled_from([1.0, 2.0, 3.0]), min_size=1))
def test_more_than_half_are_right(digests) -> None:
    split = find_mismatch(digests)
    counts = {digest: list(digests.values()).count(digest) for digest in digests.values()}
    if len(counts) == 1:
        assert split is None
        return
    assert split is not None
    most = max(counts, key=lambda digest: counts[digest])
    if 2 * counts[most] > len(digests):
        assert split.source == next(rank for rank in digests if digests[rank] == most)
        assert split.odd == tuple(rank for rank in digests if digests[rank] != most)
    else:
        assert split == ReplicaMismatch(None, tuple(digests))


@given(st.dictionaries(st.integers(0, 20), st.sampled_from([1.0, 2.0]), min_size=1), st.data())
def test_nothing_is_compared_while_one_has_said_nothing(digests, data) -> None:
    silent = data.draw(st.sampled_from(sorted(digests)))
    assert find_mismatch({**digests, silent: 0.0}) is None


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [(Skip, {"spike": 0}), (Skip, {"spike": math.nan}), (Skip, {"limit": 0}), (Skip, {"within": 1.5}),
     (RollBack, {"before": -1}), (RollBack, {"limit": True})],
)  # fmt: skip
def test_what_cannot_be_is_refused(cls, arguments) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}="):
        cls(**arguments)
