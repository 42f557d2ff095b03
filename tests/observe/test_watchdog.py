"""The watchdog of a worker: what its log says, when, and how often."""

from __future__ import annotations

import threading
from itertools import pairwise

from unisono.observe import ThreadTracker, Watchdog
from unisono.observe.activity import Activity, Phase
from unisono.observe.watchdog import LATE_SECONDS, StallDetector

WAITS = Activity(Phase.COMMUNICATION, 20, 1, 3.0, "sum (gradients, message 40)", (2,), "own.py:7 train")


def trained(patience: StallDetector, steps: int, seconds: float = 0.5) -> float:
    """When the last of so many steps was done."""
    now = 0.0
    for done in range(steps + 1):
        now = done * seconds
        assert patience.check(done, Activity(Phase.COMPUTE, done), now) == ""
    return now


def test_it_is_said_within_two_seconds_of_the_deadline_and_again_when_it_is_twice_as_long() -> None:
    patience = StallDetector(0.0)
    last = trained(patience, 40)
    said = [(i / 4, words) for i in range(1, 400) if (words := patience.check(40, WAITS, last + i / 4))]
    deadline = 2 * 0.5 + 4 * 0.0
    assert deadline + LATE_SECONDS <= said[0][0] <= deadline + 2
    assert all(2 * one[0] <= other[0] for one, other in pairwise(said))
    assert said[0][1].startswith("step 40 is not done after 2")
    assert ("this worker has been waiting for sum (gradients, message 40), which worker 2 has not started, for 3 s at "
            "own.py:7 train") in said[0][1]  # fmt: skip


def test_an_evaluation_is_no_step() -> None:
    patience = StallDetector(0.0)
    last = trained(patience, 40)
    for i in range(400):
        assert patience.check(40, Activity(Phase.EVALUATION), last + i / 4) == ""
    assert patience.check(40, Activity(Phase.COMPUTE), last + 100) == ""


def test_what_does_not_count_is_let_pass_and_who_waits_is_said_all_the_same() -> None:
    patience = StallDetector(0.0, {Phase.DATA})
    last = trained(patience, 40)
    assert not any(patience.check(40, Activity(Phase.COMPUTE), last + i / 4) for i in range(400))
    assert any(patience.check(40, WAITS, last + 100 + i / 4) for i in range(60))


def test_the_first_step_may_take_longer() -> None:
    patience = StallDetector(0.0)
    assert patience.check(0, Activity(Phase.COMPUTE), 0.0) == ""
    assert patience.check(0, Activity(Phase.COMPUTE), 10.9) == ""
    assert "step 0 is not done after 11 s" in patience.check(0, Activity(Phase.COMPUTE), 11.1)


def test_a_thread_looks_until_it_is_told_not_to(monkeypatch) -> None:
    monkeypatch.setattr("unisono.observe.watchdog._FIRST_SECONDS", 0.05)
    watch, told = ThreadTracker(), threading.Event()
    sentences: list[str] = []

    def tell(words: str) -> None:
        sentences.append(words)
        told.set()

    watch.set_phase(Phase.COMPUTE)
    dog = Watchdog(watch, report=tell)
    with watch(Phase.DATA):
        assert told.wait(60)
    dog.close()
    assert "this worker has been waiting for data for" in sentences[0]
    assert "test_watchdog.py:" in sentences[0]


def test_no_thread_looks_at_what_nobody_has_any_more() -> None:
    dog = Watchdog(ThreadTracker())
    dog._thread.join(60)
    assert not dog._thread.is_alive()
