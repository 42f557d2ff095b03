"""Assignment of micro-batches: contiguous, complete, fair, and some work for every worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data import assign
from unisono.errors import InvalidInput


@pytest.mark.parametrize(
    ("micro_batches", "shares", "counts"),
    [
        (4, [1], [4]),
        (4, [1, 1], [2, 2]),
        (4, [1, 1, 1], [2, 1, 1]),
        (8, [3, 1], [6, 2]),
        (10, [1, 2, 3], [2, 3, 5]),
        (5, [1, 0, 1], [3, 0, 2]),
        (4, [1000, 1, 1], [2, 1, 1]),
        (3, [1e-9, 1, 1e9], [1, 1, 1]),
        (100, [0.5, 0.25, 0.25], [50, 25, 25]),
    ],
)
def test_table(micro_batches, shares, counts):
    assert [len(part) for part in assign(micro_batches, shares)] == counts


@given(
    shares=st.lists(st.floats(0, 1e6) | st.just(0.0), min_size=1, max_size=20).filter(any),
    more=st.integers(0, 200),
)
def test_laws(shares, more):
    active = [share for share in shares if share > 0]
    micro_batches = len(active) + more
    parts = assign(micro_batches, shares)
    assert [m for part in parts for m in part] == list(range(micro_batches))
    for part, share in zip(parts, shares, strict=True):
        assert (len(part) > 0) == (share > 0)
    quotas = [micro_batches * share / sum(shares) for share in shares]
    if all(quota >= 1 or share == 0 for quota, share in zip(quotas, shares, strict=True)):
        assert all(abs(len(part) - quota) < 1 + 1e-6 for part, quota in zip(parts, quotas, strict=True))
    assert parts == assign(micro_batches, shares)


def test_more_workers_than_micro_batches_names_both_cures():
    with pytest.raises(InvalidInput) as error:
        assign(4, [1.0] * 6)
    assert (error.value.field, error.value.value) == ("workers", 6)
    for part in (
        "4 micro-batches",
        "at most 4 workers",
        "a smaller micro_batch",
        "a larger global_batch",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("shares", [[], [0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_impossible_shares_are_refused(shares):
    with pytest.raises(ValueError):
        assign(4, shares)
