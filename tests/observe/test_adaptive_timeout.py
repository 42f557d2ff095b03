"""What the adaptive timeout learns from the gaps between events, and what it ignores."""

import pytest

from unisono.observe.adaptive_timeout import AdaptiveTimeout


def timeout_after(*gaps: float, min_seconds: float = 0.75) -> AdaptiveTimeout:
    """A timeout for four events a second, after these gaps."""
    timeout, now = AdaptiveTimeout(0.25, min_seconds, last=0.0), 0.0
    for gap in (*[0.25] * 20, *gaps):
        now += gap
        timeout.record(now)
    return timeout


@pytest.mark.parametrize("seconds", [1.6, 5.0, 60.0])
def test_a_single_long_gap_is_not_learned(seconds: float) -> None:
    assert timeout_after(seconds).deadline_seconds == 0.75
    assert timeout_after(*[seconds, 0.25] * 10).deadline_seconds == 0.75


def test_a_shorter_gap_is_learned_and_forgotten_soon() -> None:
    assert 1.4 < timeout_after(1.4).deadline_seconds < 3.0
    assert timeout_after(1.4, *[0.25] * 16).deadline_seconds == 0.75


def test_slower_events_are_learned_from_the_second_gap_on() -> None:
    assert timeout_after(5.0, 5.0).deadline_seconds > 5.0
    assert 10.0 <= timeout_after(*[5.0] * 40).deadline_seconds < 10.5


def test_a_restart_separates_two_long_gaps() -> None:
    timeout = timeout_after(5.0)
    timeout.restart(100.0)
    timeout.record(105.0)
    assert timeout.deadline_seconds == 0.75


def test_the_first_gap_replaces_a_guess() -> None:
    timeout = AdaptiveTimeout(1.0, last=0.0, replace_first=True)
    timeout.record(30.0)
    assert timeout.usual_seconds == 30.0
