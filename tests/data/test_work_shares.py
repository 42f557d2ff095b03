"""Allocations by speed: optimal, stable unless others are clearly better, and complete."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_loader import PLAN, Recording
from unisono.data import (
    Inline,
    Load,
    Loader,
    MicroBatchAllocation,
    PaceHistory,
    Processes,
    Threads,
    assign,
    most_ahead,
    slowness,
)
from unisono.data.work_shares import HISTORY_SECONDS, HISTORY_STEPS, MIN_GAIN, fastest_counts, last_done

SECONDS = st.floats(1e-3, 10.0)
REACTS_WITHIN = 2 * HISTORY_STEPS  # of a change, the steps until most of what is heard of tells of it


def parts(micro_batches: int, seconds: Sequence[float]) -> list[tuple[int, ...]]:
    """All there are, nobody without work."""
    each = range(1, micro_batches + 1)
    return [p for p in itertools.product(each, repeat=len(seconds)) if sum(p) == micro_batches]


@given(seconds=st.lists(SECONDS, min_size=1, max_size=4), more=st.integers(0, 8))
def test_no_others_are_done_sooner(seconds, more) -> None:
    micro_batches = len(seconds) + more
    counts = fastest_counts(micro_batches, seconds)
    assert sum(counts) == micro_batches
    assert min(counts) >= 1
    assert last_done(counts, seconds) == min(last_done(p, seconds) for p in parts(micro_batches, seconds))


@given(micro_batches=st.integers(1, 200), workers=st.integers(1, 12), each=SECONDS)
def test_like_workers_have_what_all_have_at_first(micro_batches, workers, each) -> None:
    if workers <= micro_batches:
        assert fastest_counts(micro_batches, [each] * workers) == [
            len(r) for r in assign(micro_batches, [1.0] * workers)
        ]


@pytest.mark.parametrize(
    ("micro_batches", "seconds", "counts"),
    [
        (8, [1, 2.5], [6, 2]),
        (28, [1, 2.5], [20, 8]),
        (16, [1, 2.5], [12, 4]),  # of 11.4 and 4.6
        (4, [1, 1000, 1], [2, 1, 1]),
        (3, [5, 1, 9], [1, 1, 1]),
        (5, [2, 1], [2, 3]),
    ],
)
def test_table(micro_batches, seconds, counts) -> None:
    assert fastest_counts(micro_batches, seconds) == counts


@pytest.mark.parametrize(("micro_batches", "seconds"), [(1, [1, 1]), (4, []), (4, [1, 0]), (4, [1, float("nan")])])
def test_what_cannot_be_shared_is_refused(micro_batches, seconds) -> None:
    with pytest.raises(ValueError):
        fastest_counts(micro_batches, seconds)


def test_slowness_is_against_the_others() -> None:
    assert slowness([1.0]) == [1.0]
    assert slowness([1.0, 2.5]) == [0.4, 2.5]
    assert slowness([1.0, 1.0, 4.0, 1.0]) == [1.0, 1.0, 4.0, 1.0]


@pytest.mark.parametrize(
    ("load", "ahead"),
    [(Inline(), 0), (Threads(), 2), (Threads(ahead=5), 5), (Processes(count=3, ahead=2), 6), (None, 2)],
)
def test_how_far_ahead_is_fetched(load, ahead) -> None:
    assert most_ahead(load) == ahead


# Stock.


def test_stock_is_the_median_of_steps_that_all_know_of() -> None:
    stock, found = PaceHistory(), []
    for step in range(HISTORY_STEPS + 1):
        found.append(stock.add([0.0 if step == 3 else 1.0 + step, 5.0], 2))
    assert found[:-1] == [None] * HISTORY_STEPS
    assert found[-1] == [(8.0 + 7.0) / 2, 5.0]


def test_many_short_steps_make_a_stock() -> None:
    stock, each = PaceHistory(), HISTORY_SECONDS / 100
    due = [n for n in range(1, 301) if stock.add([each / 4, each / 8], 4)]
    assert len(due) in (2, 3)
    assert due[0] in (100, 101)


# Shares, as they follow what is heard.


class Group:
    """Workers whose shares follow."""

    def __init__(self, micro_batches: int, workers: int, load: Load | None = None) -> None:
        ranges = assign(micro_batches, [1.0] * workers)
        self.shares = [MicroBatchAllocation(ranges, lane, range(workers), most_ahead(load)) for lane in range(workers)]
        self.stock, self.changes, self.done = PaceHistory(), 0, 0

    def step(self, paces: Sequence[float]) -> None:
        self.done += 1
        seconds = self.stock.add(paces, max(self.counts))
        if seconds is not None:
            self.changes += len({each.rebalance(self.done, seconds) for each in self.shares} - {False})

    @property
    def counts(self) -> list[int]:
        return self.shares[0].counts


def noisy(speeds: Sequence[float], noise: float, chance: random.Random) -> list[float]:
    return [chance.uniform(1 - noise, 1 + noise) * each for each in speeds]


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_like_workers_under_noise_keep_their_shares(workers, seed) -> None:
    group, chance = Group(8 * workers, workers), random.Random(seed)
    for _ in range(2000):
        paces = noisy([0.1] * workers, 0.1, chance)
        if chance.random() < 0.1:  # now and then something else runs for a moment
            paces[chance.randrange(workers)] *= 10
        group.step(paces)
    assert group.changes == 0


@pytest.mark.parametrize("seed", range(3))
def test_unequal_workers_soon_have_the_best_shares_and_keep_them(seed) -> None:
    group, chance = Group(28, 2), random.Random(seed)
    for _ in range(REACTS_WITHIN):
        group.step(noisy([0.1, 0.25], 0.05, chance))
    assert group.counts == [20, 8]
    for _ in range(1000):
        group.step(noisy([0.1, 0.25], 0.05, chance))
    assert group.counts == [20, 8]
    assert group.changes <= 2


def test_a_change_of_speed_is_followed_there_and_back() -> None:
    group = Group(28, 2)
    for speeds, counts in (([0.1, 0.25], [20, 8]), ([0.1, 0.1], [14, 14]), ([0.3, 0.1], [7, 21])):
        for _ in range(REACTS_WITHIN):
            group.step(speeds)
        assert group.counts == counts


@given(seconds=st.lists(SECONDS, min_size=2, max_size=4), more=st.integers(0, 30))
def test_shares_change_if_and_only_if_it_is_worth_it(seconds, more) -> None:
    group = Group(len(seconds) + more, len(seconds))
    shares = group.shares[0]
    saved = shares.could_save(seconds)
    before = last_done(shares.counts, seconds)
    assert shares.rebalance(0, seconds) == (saved >= MIN_GAIN)
    after = last_done(shares.counts, seconds)
    assert after == pytest.approx(before * (1 - saved) if saved >= MIN_GAIN else before)
    assert not shares.rebalance(0, seconds)


# What workers then load.

WAYS = st.sampled_from([Inline(), Threads(ahead=1), Threads(ahead=3), None])


@settings(max_examples=30)
@given(
    load=WAYS,
    workers=st.integers(1, 4),
    speeds=st.lists(st.lists(st.sampled_from([1.0, 2.0, 7.0]), min_size=4, max_size=4), min_size=8, max_size=8),
)
def test_whatever_shares_do_each_batch_is_right_and_fetched_once(load, workers, speeds) -> None:
    check(load, workers, speeds)


@pytest.mark.parametrize("load", [Processes(), Processes(count=2, ahead=2)], ids=str)
def test_so_it_is_with_processes(load) -> None:
    check(load, 2, [[1.0, 1.0], [1.0, 7.0], [7.0, 1.0], [1.0, 1.0]] * 4)


def check(load: Any, workers: int, speeds: Sequence[Sequence[float]]) -> None:
    """After every step the shares follow other speeds; all batches of all steps come to some worker."""
    group, steps = Group(PLAN.micro_batches, workers, load), len(speeds)
    datasets = [Recording() for _ in range(workers)]
    loaders = [
        Loader(data, PLAN, shares.mine, load=load, steps=range(steps))
        for data, shares in zip(datasets, group.shares, strict=True)
    ]
    try:
        for step, seconds in enumerate(speeds):
            found = {}
            for rank, loader in enumerate(loaders):
                for m, (_, numbers) in loader.batches(step):
                    assert numbers.tolist() == PLAN.indices(step, m).tolist()
                    assert group.shares[0].worker_of(step, m) == rank
                    assert m not in found
                    found[m] = rank
            assert found.keys() == set(range(PLAN.micro_batches))
            assert list(found.values()) == sorted(found.values())
            assert set(found.values()) == set(range(workers))
            for shares in group.shares:
                shares.rebalance(step + 1, seconds[:workers])
    finally:
        for loader in loaders:
            loader.close()
    if not isinstance(load, Processes):  # whose datasets are copies
        fetched = [i for data in datasets for i in data.touched]
        assert sorted(fetched) == sorted(i for t in range(steps) for m in range(4) for i in PLAN.indices(t, m).tolist())
