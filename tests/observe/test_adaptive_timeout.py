"""What the adaptive timeout learns from the gaps between events, and what it ignores."""

import pytest

from unisono.observe.adaptive_timeout import AdaptiveTimeout


def beaten(*gaps: float, least_seconds: float = 0.75) -> AdaptiveTimeout:
    """A pulse of four beats a second, after these gaps."""
    pulse, now = AdaptiveTimeout(0.25, least_seconds, last=0.0), 0.0
    for gap in (*[0.25] * 20, *gaps):
        now += gap
        pulse.record(now)
    return pulse


@pytest.mark.parametrize("seconds", [1.6, 5.0, 60.0])
def test_a_single_long_silence_is_not_learned(seconds: float) -> None:
    assert beaten(seconds).deadline_seconds == 0.75
    assert beaten(*[seconds, 0.25] * 10).deadline_seconds == 0.75


def test_a_short_one_is_learned_and_forgotten_soon() -> None:
    assert 1.4 < beaten(1.4).deadline_seconds < 3.0
    assert beaten(1.4, *[0.25] * 16).deadline_seconds == 0.75


def test_a_rhythm_that_has_become_slower_is_learned_from_the_second_gap_on() -> None:
    assert beaten(5.0, 5.0).deadline_seconds > 5.0
    assert 10.0 <= beaten(*[5.0] * 40).deadline_seconds < 10.5


def test_a_restart_separates_two_long_silences() -> None:
    pulse = beaten(5.0)
    pulse.restart(100.0)
    pulse.record(105.0)
    assert pulse.deadline_seconds == 0.75


def test_the_first_gap_takes_the_place_of_a_guess_however_long_it_is() -> None:
    pulse = AdaptiveTimeout(1.0, last=0.0, replace_first=True)
    pulse.record(30.0)
    assert pulse.usual_seconds == 30.0
