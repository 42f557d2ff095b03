"""The subset of `tests.campaigns.layouts` for the test suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.layouts.cells import SAME, Bench, expected
from tests.campaigns.layouts.resume_pairs import Resumed, pairs
from tests.campaigns.layouts.suite_subset import CELLS, CORNERS, PAIRS, STEPS


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("cells"), STEPS)


def test_the_short_form_is_part_of_the_campaign() -> None:
    assert expected().keys() > {*CELLS, *CORNERS}
    assert set(pairs()) > set(PAIRS)


@pytest.mark.short(2)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_model_of_any_kind_learns_under_a_layout_what_it_does_on_one_worker(cell, bench) -> None:
    outcome = bench.outcome(cell)
    assert outcome.is_what(expected()[cell]), outcome


@pytest.mark.short(3)
@pytest.mark.parametrize("cell", CORNERS, ids=str)
def test_a_model_at_a_corner_learns_what_it_does_on_one_worker_or_is_refused_in_words(cell, bench) -> None:
    outcome = bench.outcome(cell)
    assert outcome.is_what(expected()[cell]), outcome


@pytest.mark.short(1)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_layout_goes_on_from_what_another_has_saved(pair, tmp_path: Path) -> None:
    differs, same = Resumed(tmp_path).differs(pair)
    assert same
    assert differs <= SAME
