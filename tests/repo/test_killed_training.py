"""Conclusions from what the processes of a benchmark with faults wrote; never their times."""

from __future__ import annotations

import inspect
import json

import numpy as np
import pytest
from benchmarks.elasticity import failures, freezes
from benchmarks.elasticity import recovery as recovery_benchmark
from benchmarks.elasticity.killed_training import (
    MICRO_BATCH,
    MICRO_BATCHES,
    SAMPLES,
    WORKERS,
    ProcessTrace,
    Recovery,
    Step,
    recovery,
    spoilt,
)

from unisono.data import MicroBatchPlan
from unisono.elastic import session

FAIR = MICRO_BATCHES // WORKERS


def trace(pid: int, born: float, *steps: tuple[float, int, int]) -> ProcessTrace:
    return ProcessTrace(pid, born, born, [Step(*step) for step in steps])


LOST = trace(1, 0.0, (1.0, 1, FAIR), (2.0, 2, FAIR))


def test_the_step_that_was_under_way_may_be_of_the_dead() -> None:
    """Step 3 had its part, 4 did not: others computed what it would have."""
    survivor = trace(2, 0.0, (1.0, 1, FAIR), (2.0, 2, FAIR), (2.5, 3, FAIR), (4.0, 4, 2 * FAIR))
    another = trace(3, 3.0, (5.0, 5, FAIR))
    assert recovery([LOST, survivor, another], LOST, 2.25) == Recovery(1.75, 0, 0.75, 2.75, 2.0)


def test_who_all_begin_anew_have_lost_steps() -> None:
    survivor = trace(2, 0.0, (1.0, 1, FAIR), (2.0, 2, FAIR))
    others = [trace(pid, 6.0, (9.0, 1, FAIR)) for pid in (3, 4)]
    assert recovery([LOST, survivor, *others], LOST, 2.5) == Recovery(6.5, 2, 3.5, 6.5, 3.0)


def test_who_took_part_is_taken_at_its_word() -> None:
    survivor = ProcessTrace(2, 0.0, 0.0, [Step(2.6, 3, FAIR, 3), Step(4.0, 4, FAIR, 2)])
    assert recovery([LOST, survivor, trace(3, 3.0, (5.0, 5, FAIR))], LOST, 2.5).next_seconds == 1.5


def test_it_is_not_over_before_another_has_taken_a_step() -> None:
    survivor = trace(2, 0.0, (4.0, 3, 2 * FAIR))
    for traces in ([LOST, survivor], [LOST, survivor, trace(3, 3.0)]):
        with pytest.raises(LookupError):
            recovery(traces, LOST, 2.5)


def test_samples_that_are_missing_or_too_often_are_counted() -> None:
    steps, plan = 2, MicroBatchPlan(SAMPLES, MICRO_BATCHES * MICRO_BATCH, MICRO_BATCH)
    used = [i for step in range(steps) for m in range(MICRO_BATCHES) for i in plan.indices(step, m)]
    tally = np.zeros(SAMPLES)
    tally[used] = 1.0001  # sums are rounded
    assert spoilt(tally, steps) == (0, 0)
    tally[used[0]], tally[used[1]] = 0.0, 2.0
    assert spoilt(tally, steps) == (1, 1)
    assert spoilt(tally, steps + 1)[0] == 1 + MICRO_BATCHES * MICRO_BATCH


def test_a_process_says_when_it_was_born_and_what_it_did() -> None:
    found = ProcessTrace(7)
    for line in ({"at": 2.0, "born": 1.5}, {"at": 3.0, "step": 1, "computed": 4, "workers": 0}):
        found.read(json.dumps(line))
    assert found == ProcessTrace(7, 1.5, 2.0, [Step(3.0, 1, 4)])


def test_a_worker_is_missing_until_another_is_started() -> None:
    traces = [trace(1, 0.0), trace(2, 0.0), trace(3, 12.0)]
    assert failures.missing_seconds(traces, [10.0], 20.0) == 2.0
    assert failures.missing_seconds(traces, [10.0, 15.0], 20.0) == 7.0


def test_what_those_present_would_have_done_is_between_three_and_two() -> None:
    found = {
        failures.BASELINE: [{"steps_per_second": 12.0}],
        failures.BASELINE_FEWER: [{"steps_per_second": 8.0}],
        failures.UNISONO: [{"steps_per_second": 11.0, "missing_seconds": 25.0}],
    }
    assert failures.expected(found, 100.0) == [11.0]
    assert failures.judged(found, 100.0)[0].ratio.median == 1.0


def test_a_freeze_holds_the_others_up_from_when_it_begins() -> None:
    others = [trace(1, 0.0, (9.5, 1, FAIR), (12.0, 2, FAIR), (13.0, 3, FAIR)), trace(2, 0.0, (14.5, 4, FAIR))]
    assert freezes.held_seconds(others, 10.0, 14.0) == 2.0
    assert freezes.held_seconds(others, 12.5, 14.0) == 1.5
    with pytest.raises(LookupError):
        freezes.held_seconds(others, 10.0, 15.0)


def test_a_stopped_worker_is_not_present() -> None:
    found = {
        freezes.BASELINE: [{"steps_per_second": 12.0}],
        freezes.BASELINE_FEWER: [{"steps_per_second": 8.0}],
        freezes.UNISONO: [{"steps_per_second": 9.0, "stopped_share": 0.5, "first_seconds": 1.0, "last_seconds": 1.6}],
    }
    assert [(verdict.ratio.median, verdict.holds) for verdict in freezes.judged(found)] == [(0.9, True), (1.6, False)]


def test_the_log_line_that_the_benchmark_waits_for_is_written() -> None:
    assert '"view %d is over: ' in inspect.getsource(session)
    assert " is over" in inspect.getsource(recovery_benchmark._first_report)
