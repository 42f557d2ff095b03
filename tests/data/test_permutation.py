"""The seeded order: a bijection for every size, different for every seed and epoch, uniform."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data import Permutation


def order(size, seed=0, epoch=0):
    return Permutation(size, seed, epoch)(np.arange(size))


@pytest.mark.parametrize("sizes", [range(1, 151), range(151, 301), (1000, 1797, 4096, 4097, 65536, 65537, 10**6)])
def test_every_size_is_a_bijection(sizes):
    for size in sizes:
        assert np.array_equal(np.sort(order(size, seed=size)), np.arange(size)), size


@settings(max_examples=50)
@given(size=st.integers(1, 20000), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**9))
def test_any_seed_and_epoch_give_a_bijection(size, seed, epoch):
    assert np.array_equal(np.sort(order(size, seed, epoch)), np.arange(size))


@settings(max_examples=50)
@given(size=st.integers(1, 2**62), start=st.floats(0, 1), count=st.integers(1, 100), seed=st.integers(0, 99))
def test_huge_sizes_stay_in_range_without_repeats_and_do_not_depend_on_what_else_is_asked(size, start, count, seed):
    count = min(count, size)
    first = min(int(start * (size - count)), size - count)
    permutation = Permutation(size, seed, 0)
    together = permutation(np.arange(first, first + count))
    assert len(set(together.tolist())) == count
    assert 0 <= together.min() <= together.max() < size
    assert together.tolist() == [int(permutation(np.array(first + i))) for i in range(count)]


@pytest.mark.parametrize("other", [{"seed": 1}, {"epoch": 1}, {"seed": 2**40}])
def test_seeds_and_epochs_have_orders_of_their_own(other):
    same_place = int((order(10000) == order(10000, **other)).sum())
    assert same_place < 10  # one is expected by chance


def test_the_order_is_fixed_for_good():
    assert order(10, seed=1, epoch=2).tolist() == [4, 1, 5, 0, 3, 7, 2, 9, 8, 6]


def test_seed_and_epoch_are_not_interchangeable():
    assert order(50, seed=1, epoch=2).tolist() != order(50, seed=2, epoch=1).tolist()


@pytest.mark.parametrize("size", [5, 16, 37])
def test_every_sample_comes_to_every_position_equally_often(size):
    draws = 3000
    counts = np.zeros((size, size))
    for seed in range(draws):
        counts[np.arange(size), order(size, seed)] += 1
    expected = draws / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_a_large_order_has_no_runs():
    values = Permutation(10**12, 3, 0)(np.arange(100_000)) / 10**12
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 5 * np.sqrt(2 * 99)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.015


def test_wrong_sizes_and_positions_are_named():
    for size in (0, 2**62 + 1):
        with pytest.raises(ValueError, match=r"size="):
            Permutation(size, 0, 0)
    for position in (-1, 10):
        with pytest.raises(ValueError, match=r"range\(10\)"):
            Permutation(10, 0, 0)(np.array([position]))
    assert Permutation(10, 0, 0)(np.empty(0, dtype=np.int64)).size == 0


def test_a_million_million_samples_start_at_once():
    began = time.process_time()
    Permutation(10**12, 0, 0)(np.arange(64))
    assert time.process_time() - began < 0.05
