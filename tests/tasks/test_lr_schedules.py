"""The learning-rate schedules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.tasks.lr_schedules import SCHEDULES, Constant, Cosine, Linear

WARMUP, FLOOR = st.integers(0, 50), st.floats(0, 1)
ANY = st.builds(Constant, WARMUP) | st.builds(Linear, WARMUP, FLOOR) | st.builds(Cosine, WARMUP, FLOOR)


@pytest.mark.parametrize(
    ("schedule", "steps", "factors"),
    [
        (Constant(), 3, [1, 1, 1]),
        (Constant(warmup=4), 6, [0.25, 0.5, 0.75, 1, 1, 1]),
        (Linear(), 5, [1, 0.75, 0.5, 0.25, 0]),
        (Linear(floor=0.5), 3, [1, 0.75, 0.5]),
        (Linear(warmup=2), 5, [0.5, 1, 1, 0.5, 0]),
        (Cosine(), 5, [1, 0.8535534, 0.5, 0.1464466, 0]),
        (Cosine(warmup=2, floor=0.1), 5, [0.5, 1, 1, 0.55, 0.1]),
        (Cosine(), 1, [1]),
        (Linear(warmup=9), 2, [1 / 9, 2 / 9]),
    ],
)
def test_shapes(schedule, steps, factors) -> None:
    assert [schedule(step, steps) for step in range(steps)] == pytest.approx(factors)


@given(ANY, st.integers(1, 200))
def test_it_rises_then_falls_to_the_floor_and_stays_in_bounds(schedule, steps) -> None:
    factors = [schedule(step, steps) for step in range(steps)]
    top = min(schedule.warmup, steps)
    assert all(0 <= f <= 1 for f in factors)
    assert factors[:top] == sorted(factors[:top])
    assert all(later <= f + 1e-12 for f, later in zip(factors[top:], factors[top + 1 :]))
    if steps > schedule.warmup + 1:
        assert factors[-1] == pytest.approx(getattr(schedule, "floor", 1.0))


@pytest.mark.parametrize("kind", SCHEDULES.values())
@pytest.mark.parametrize("wrong", [{"warmup": -1}, {"warmup": 1.5}, {"warmup": True}, {"floor": -0.1}, {"floor": "x"}])
def test_bad_values_are_refused(kind, wrong) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        kind(**wrong)
