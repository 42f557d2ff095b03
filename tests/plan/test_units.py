"""Rates, times and their distributions, as text."""

from __future__ import annotations

import random
import statistics

import pytest

from unisono.errors import InvalidInput
from unisono.plan import Compute, Fixed, Normal, Uniform
from unisono.plan.units import bytes_per_second, seconds


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100Mbit", 12.5e6),
        ("100 Mbit/s", 12.5e6),
        ("1Gbit", 125e6),
        ("1gbit", 125e6),
        ("0.5Gbps", 62.5e6),
        ("12.5MB/s", 12.5e6),
        ("1GiB/s", 2**30),
        ("800bit", 100),
        (".5kbit", 62.5),
        ("1e3Mbit", 125e6),
    ],
)
def test_rates(text: str, rate: float) -> None:
    assert bytes_per_second("--link", text) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("text", "time"),
    [("20ms", 0.02), ("50us", 5e-5), ("50µs", 5e-5), ("1.5 s", 1.5), ("0", 0.0), ("0s", 0.0), ("2min", 120.0)],
)
def test_times(text: str, time: float) -> None:
    assert seconds("--latency", text) == pytest.approx(time)


@pytest.mark.parametrize(
    "text", ["", "100", "Mbit", "100MB", "100Mb/s", "0Mbit", "-1Mbit", "1e999Mbit", "nanbit", "1..2Mbit"]
)
def test_what_is_no_rate_says_how_one_is_written(text: str) -> None:
    with pytest.raises(InvalidInput, match="write for instance 100Mbit") as told:
        bytes_per_second("--link", text)
    assert told.value.field == "--link"


@pytest.mark.parametrize("text", ["", "20", "ms", "20 parsec", "-1ms", "1e999s", "MS", "20MS"])
def test_what_is_no_time_says_how_one_is_written(text: str) -> None:
    with pytest.raises(InvalidInput, match="write for instance 20ms") as told:
        seconds("--latency", text)
    assert told.value.field == "--latency"


@pytest.mark.parametrize(
    ("text", "durations"),
    [
        ("50ms", (Fixed(0.05),)),
        ("50ms±10%", (Normal(0.05, 0.1),)),
        ("50ms+-10%", (Normal(0.05, 0.1),)),
        ("50ms ± 7.5 %", (Normal(0.05, 0.075),)),
        ("40ms..80ms", (Uniform(0.04, 0.08),)),
        ("50ms,50ms,0.17s", (Fixed(0.05), Fixed(0.05), Fixed(0.17))),
        ("50ms, 60ms±5%", (Fixed(0.05), Normal(0.06, 0.05))),
    ],
)
def test_computing(text: str, durations: tuple[object, ...]) -> None:
    assert Compute.of("--compute", text).durations == durations


@pytest.mark.parametrize(
    "text", ["", "50", "50ms±", "50ms±10", "50ms±200%", "80ms..40ms", "40ms..", "50ms,,50ms", "±10%", "fast"]
)
def test_what_is_no_computing_names_the_option_and_all_forms(text: str) -> None:
    with pytest.raises(
        InvalidInput, match=r"write for instance 50ms, 50ms±10%, 40ms\.\.80ms, one of them per worker"
    ) as told:
        Compute.of("--compute", text)
    assert (told.value.field, told.value.value) == ("--compute", text or "(nothing)")


def test_draws_depend_on_seed_worker_and_step_alone() -> None:
    compute = Compute.of("--compute", "50ms±10%")
    drawn = {(s, w, t): compute.seconds(s, w, t) for s in range(3) for w in range(5) for t in range(20)}
    assert {key: compute.seconds(*key) for key in reversed(drawn)} == drawn
    assert len(set(drawn.values())) == len(drawn)


def test_draws_have_the_mean_the_spread_and_the_bounds_that_were_asked_for() -> None:
    source = random.Random(0)
    normal = [Normal(2.0, 0.1).draw(source) for _ in range(4000)]
    assert statistics.mean(normal) == pytest.approx(2.0, rel=0.01)
    assert statistics.stdev(normal) == pytest.approx(0.2, rel=0.05)
    assert min(normal) >= 2 * 0.7
    assert max(normal) <= 2 * 1.3
    assert min(Normal(1.0, 1.0).draw(source) for _ in range(400)) == 0.0
    even = [Uniform(1.0, 3.0).draw(source) for _ in range(4000)]
    assert statistics.mean(even) == pytest.approx(2.0, rel=0.02)
    assert (min(even), max(even)) == (pytest.approx(1.0, abs=0.01), pytest.approx(3.0, abs=0.01))
