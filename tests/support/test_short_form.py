"""The short form of a table covers as many different values as its number of rows allows."""

import itertools

import pytest

from tests.support.short_form import short_form

PRODUCT = [{"sync": sync, "compress": compress} for sync, compress in itertools.product(range(3), range(5))]


def test_each_value_of_each_argument_occurs() -> None:
    kept = [PRODUCT[i] for i in short_form(PRODUCT, 5)]
    assert {row["sync"] for row in kept} == {0, 1, 2}
    assert {row["compress"] for row in kept} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("most", [1, 2, 7, 15, 99])
def test_it_has_so_many_rows_or_all(most) -> None:
    assert len(short_form(PRODUCT, most)) == min(most, 15)


def test_of_one_argument_rows_are_spread() -> None:
    assert short_form([{"n": i} for i in range(9)], 3) == {0, 3, 6}
