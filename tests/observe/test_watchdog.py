"""The watchdog of a worker: what its log says, when, and how often."""

from __future__ import annotations

import threading
from itertools import pairwise

from unisono.observe import ThreadTracker, Watchdog
from unisono.observe.activity import Activity, Phase
from unisono.observe.watchdog import LATE_SECONDS, StallDetector

WAITS = Activity(Phase.COMMUNICATION, 20, 1, 3.0, "sum (gradients, message 40)", (2,), "own.py:7 train")


def trained(detector: StallDetector, steps: int, seconds: float = 0.5) -> float:
    """Takes steps; returns the time of the last one."""
    now = 0.0
    for done in range(steps + 1):
        now = done * seconds
        assert detector.check(done, Activity(Phase.COMPUTE, done), now) == ""
    return now


def test_a_stall_is_reported_within_two_seconds_of_the_deadline_and_again_when_it_has_doubled() -> None:
    detector = StallDetector(0.0)
    last = trained(detector, 40)
    reports = [(i / 4, words) for i in range(1, 400) if (words := detector.check(40, WAITS, last + i / 4))]
    deadline = 2 * 0.5 + 4 * 0.0
    assert deadline + LATE_SECONDS <= reports[0][0] <= deadline + 2
    assert all(2 * one[0] <= other[0] for one, other in pairwise(reports))
    assert reports[0][1].startswith("step 40 is not done after 2")
    assert ("this worker has been waiting for sum (gradients, message 40), which worker 2 has not started, for 3 s at "
            "own.py:7 train") in reports[0][1]  # fmt: skip


def test_an_evaluation_is_not_a_stall() -> None:
    detector = StallDetector(0.0)
    last = trained(detector, 40)
    for i in range(400):
        assert detector.check(40, Activity(Phase.EVALUATION), last + i / 4) == ""
    assert detector.check(40, Activity(Phase.COMPUTE), last + 100) == ""


def test_only_watched_phases_and_waiting_count() -> None:
    detector = StallDetector(0.0, {Phase.DATA})
    last = trained(detector, 40)
    assert not any(detector.check(40, Activity(Phase.COMPUTE), last + i / 4) for i in range(400))
    assert any(detector.check(40, WAITS, last + 100 + i / 4) for i in range(60))


def test_the_first_step_may_take_longer() -> None:
    detector = StallDetector(0.0)
    assert detector.check(0, Activity(Phase.COMPUTE), 0.0) == ""
    assert detector.check(0, Activity(Phase.COMPUTE), 10.9) == ""
    assert "step 0 is not done after 11 s" in detector.check(0, Activity(Phase.COMPUTE), 11.1)


def test_the_thread_reports_stalls_until_it_is_closed(monkeypatch) -> None:
    monkeypatch.setattr("unisono.observe.watchdog._FIRST_SECONDS", 0.05)
    watch, reported = ThreadTracker(), threading.Event()
    sentences: list[str] = []

    def report(words: str) -> None:
        sentences.append(words)
        reported.set()

    watch.set_phase(Phase.COMPUTE)
    watchdog = Watchdog(watch, report=report)
    with watch(Phase.DATA):
        assert reported.wait(60)
    watchdog.close()
    assert "this worker has been waiting for data for" in sentences[0]
    assert "test_watchdog.py:" in sentences[0]


def test_the_thread_ends_when_its_tracker_is_garbage() -> None:
    watchdog = Watchdog(ThreadTracker())
    watchdog._thread.join(60)
    assert not watchdog._thread.is_alive()
