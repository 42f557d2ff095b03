"""Training loops as people write them come to what plain torch comes to on all samples, or are refused in words."""

from __future__ import annotations

import pytest

from tests.end_to_end.loop_cases import CASES, Expected
from tests.end_to_end.loop_cases.comparison import (
    FORMS,
    difference,
    in_micro_batches,
    in_plain_torch,
    in_threads,
    without_exchange,
)
from tests.end_to_end.loop_cases.environments import OwnSlices

ROWS = [
    pytest.param(name, form, id=f"{name}-{form}", marks=[pytest.mark.long] if case.slow else [])
    for name, case in CASES.items()
    for form in FORMS
    if case.expected(form) is not Expected.ABSENT
]
WITH_STEPS = [name for name, case in CASES.items() if case.steps is not Expected.ABSENT and not case.slow]
OF_SAMPLES = [name for name, case in CASES.items() if case.data_matters and not case.slow]


@pytest.mark.short(60)
@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [2, 3, 1])
@pytest.mark.parametrize(("name", "form"), ROWS)
def test_a_loop_on_several_workers_is_the_loop_on_all_samples(name: str, form: str, size: int) -> None:
    case = CASES[name]
    verdict = in_threads(case, form, size)
    assert verdict.fits(case.expected(form), size), verdict


@pytest.mark.short(20)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WITH_STEPS)
def test_a_case_for_steps_comes_to_the_same_with_micro_batches_one_after_the_other(name: str) -> None:
    """Else the case, and not the world, would be wrong."""
    case = CASES[name]
    assert difference(in_plain_torch(case, "steps", 1), in_micro_batches(case))[1] <= case.tolerance


@pytest.mark.short(20)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OF_SAMPLES)
def test_a_case_notices_workers_that_exchange_nothing(name: str) -> None:
    case = CASES[name]
    alone = without_exchange(case, OwnSlices(1, 2))
    assert difference(in_plain_torch(case, "own", 2), alone)[1] > 10 * case.tolerance
