"""Faults that end a run or that it survives: the report names the worker and the user's line."""

from __future__ import annotations

import re

import pytest

from tests.end_to_end.faults.planted import BAD_SAMPLE, line_of
from tests.end_to_end.faults.runs import PLANTED, fail_together, run
from unisono.data import MicroBatchPlan
from unisono.errors import Diverged, InvalidInput, WorkerFailed
from unisono.observe.goodput import advice


@pytest.mark.parametrize(("fault", "reason"), [
    ("raise", "ValueError: spilled milk"), ("file", "FileNotFoundError: .*not-on-this-host.bin"),
    ("memory", "can't allocate memory|MemoryError"),
])  # fmt: skip
def test_an_error_in_one_worker_is_named_with_its_line(fault, reason, tmp_path) -> None:
    error = run(fault, tmp_path).error
    assert isinstance(error, WorkerFailed)
    assert error.rank == 1
    assert re.search(reason, error.reason), error.reason
    assert fault != "file" or re.search(r"\(sample \d+, of step 1, micro-batch 3, after 1 step\)", error.reason)
    assert f'{PLANTED}", line {line_of(fault)}' in error.traceback


def test_models_that_differ_are_named_by_their_first_tensor(tmp_path) -> None:
    error = run("model", tmp_path).error
    assert isinstance(error, InvalidInput)
    assert "first.bias is (32,) x float32 on worker 0 and (33,) x float32 on worker 1" in str(error)


def test_a_sample_that_is_no_number_is_found_in_its_micro_batch_and_worker(tmp_path) -> None:
    plan = MicroBatchPlan(96, 24, 4, 0)
    step, m = next((t, m) for t in range(4) for m in range(6) if BAD_SAMPLE in plan.indices(t, m))
    error = run("nan", tmp_path).error
    assert isinstance(error, Diverged)
    for words in (f"step {step}", f"micro-batch {m}", f"worker {m // 3}"):
        assert words in str(error)


def test_a_disk_that_is_full_for_one_worker_is_named_and_training_goes_on(tmp_path) -> None:
    told = run("", tmp_path, file_bytes={1: 4096}, checkpoint_every=10)
    assert told.failures == []
    assert [words for words in told.notices if "worker 1" in words and "file too large" in words], told.notices
    assert "file too large" in told.logs[1]


def test_who_leaves_out_a_collective_is_named_with_the_line_of_each_and_so_are_the_others(tmp_path) -> None:
    """In a loop of the user's own: one asks for something that the other does not, on the same lane."""
    error = fail_together("mismatch")
    assert "worker 0: message" in error.reason
    assert f"worker 0 was at {PLANTED}:{line_of('one')} loop" in error.reason
    assert f"worker 1 was at {PLANTED}:{line_of('other')} loop" in error.reason


def test_a_slow_host_is_named_by_where_the_time_went(tmp_path) -> None:
    told = run("slow", tmp_path)
    assert told.results[0] is not None
    ledger = told.results[0]["ledger"]
    assert advice(ledger).startswith("worker 1 took ")
    for spent, age in zip(ledger, told.ages_seconds, strict=True):  # of which the last bit came after it was told
        assert age - 2.0 < sum(spent.values()) <= age + 0.02  # the system counts a process's age in hundredths
