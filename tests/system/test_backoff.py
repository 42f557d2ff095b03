"""Backoff: pauses that grow up to a bound, after any number of attempts."""

from __future__ import annotations

import math

import pytest

from unisono.system.backoff import Backoff


@pytest.mark.parametrize("backoff", [Backoff(20e-6, 1.1, 500e-6), Backoff(1.0, 2.0, 60.0), Backoff(0.1, 2.0, 5.0)])
def test_pauses_grow_by_the_factor_up_to_the_bound(backoff: Backoff) -> None:
    assert backoff.seconds(0) == backoff.first_seconds
    for attempt in range(100):
        expected = min(backoff.first_seconds * backoff.factor**attempt, backoff.longest_seconds)
        assert math.isclose(backoff.seconds(attempt), expected), attempt


@pytest.mark.parametrize("attempt", [1025, 7_449, 10**6, 10**9, 10**400])
def test_no_number_of_attempts_is_too_large(attempt: int) -> None:
    assert Backoff(20e-6, 1.1, 500e-6).seconds(attempt) == 500e-6
    assert Backoff(1.0, 2.0, 60.0).seconds(attempt) == 60.0


def test_a_pause_may_be_constant() -> None:
    assert [Backoff(0.5, 2.0, 0.5).seconds(attempt) for attempt in (0, 1, 5000)] == [0.5] * 3
