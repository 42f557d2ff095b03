"""Which of several failures is the cause, as a table."""

from __future__ import annotations

import pickle

import pytest

from unisono.errors import InvalidInput, WorkerFailed
from unisono.launch import Interrupted, ScriptExited
from unisono.launch.failure import Failure, first_cause
from unisono.system.exit_status import describe_exit


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([(0, 1.0, False)], 0),
        ([(0, 2.0, False), (1, 1.0, False)], 1),
        ([(0, 1.0, True), (1, 2.0, False)], 1),
        ([(0, 2.0, True), (1, 1.0, True)], 1),
        ([(0, 1.0, True), (1, 3.0, False), (2, 2.0, False)], 2),
        ([(2, 1.0, False), (1, 1.0, False)], 1),
    ],
)
def test_the_earliest_failure_that_is_no_consequence_is_the_cause(
    failures: list[tuple[int, float, bool]], rank: int
) -> None:
    found = first_cause([Failure(*failure[:2], "…", consequence=failure[2]) for failure in failures])
    assert found.rank == rank


def test_workers_that_exited_before_are_named() -> None:
    found = first_cause([Failure(0, 1.0, "worker 1 lost", consequence=True)], {1: "its script finished"})
    assert found.reason == "worker 1 lost; worker 1 had exited before: its script finished"
    found = first_cause([Failure(0, 1.0, "ValueError: bad")], {1: "its script finished"})
    assert found.reason == "ValueError: bad"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, "ended with exit code 0 and without a result"),
        (-9, "killed by SIGKILL (out of memory?)"),
        (-15, "killed by SIGTERM"),
        (-63, "killed by signal 63"),
    ],
)
def test_exit_statuses_as_text(status: int, said: str) -> None:
    assert describe_exit(status) == said


def test_the_traceback_is_shown_with_the_error() -> None:
    error = Failure(1, 0.0, "ValueError: x", "Traceback …\nValueError: x\n").error()
    assert isinstance(error, WorkerFailed)
    assert error.__notes__ == ["In worker 1:\nTraceback …\nValueError: x"]


def test_invalid_input_and_exit_codes_become_themselves() -> None:
    assert isinstance(Failure(0, 0.0, "…", original=("InvalidInput", ["a", 1, "b", "c"])).error(), InvalidInput)
    assert isinstance(Failure(0, 0.0, "…", exit_code=3).error(), ScriptExited)


@pytest.mark.parametrize("error", [Interrupted(2, [1], "after 3 steps"), ScriptExited(1, 3)])
def test_errors_travel_by_pickle(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
