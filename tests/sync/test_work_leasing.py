"""Work that is dealt out: each micro-batch to one worker, to the end of a step, whoever is quick or slow."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from unisono.comm import ActorMessage, simulate
from unisono.sync.work_leasing import LeaseClient, LeaseServer, TakingTurns, lease


@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("micro_batches", [1, 2, 6, 7, 12, 64])
def test_a_lease_divides_a_step_and_is_no_more_than_a_workers_part(micro_batches, workers) -> None:
    size = lease(micro_batches, workers)
    assert micro_batches % size == 0
    assert size == 1 or size * workers <= micro_batches
    assert lease(12, 5) == 2


def stay(comm) -> None:
    """The dealer lives in worker 0: nobody leaves before all are done."""
    comm.gather(torch.zeros(1)).wait()


def deal(comm, stretches, seconds, stop=lambda comm, done: False):
    """Compute what is dealt out in `stretches`; the shares, and where each stretch ended."""
    dealing, shares, ends = LeaseClient(comm, 6), [], []
    first = 0
    for until in stretches:
        for step, micro_batches in dealing.shares(first, until, lambda: stop(comm, shares)):
            assert dealing.upcoming() == (step, micro_batches)
            comm.compute(seconds(comm.rank) / 2)
            dealing.prepare()
            comm.compute(seconds(comm.rank) / 2)
            shares.append((comm.now(), step, micro_batches))
            assert dealing.finished() == (step, micro_batches)
        assert dealing.upcoming() is None
        first = dealing.dealt
        ends.append(first)
    stay(comm)
    return shares, ends


def micro_batches_of(outcome) -> list[tuple[int, int]]:
    return sorted((step, m) for shares, _ in outcome for _, step, mine in shares for m in mine)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_every_micro_batch_is_dealt_out_once_in_order(size, seed) -> None:
    draw = random.Random(seed)
    outcome = simulate(size, deal, [5, 9, 20], lambda rank: draw.choice([0.1, 1.0, 20.0]))
    assert micro_batches_of(outcome) == [(step, m) for step in range(20) for m in range(6)]
    for shares, ends in outcome:
        assert ends == [5, 9, 20]
        assert all(one[1:][0] <= other[1:][0] for one, other in pairwise(shares))
    assert len({step for shares, _ in outcome for _, step, _ in shares}) == 20


def test_a_faster_worker_computes_more() -> None:
    outcome = simulate(3, deal, [20], {0: 1.0, 1: 1.0, 2: 4.0}.get)
    mine = [sum(len(m) for *_, m in shares) for shares, _ in outcome]
    assert mine[0] == pytest.approx(4 * mine[2], rel=0.2)
    assert sum(mine) == 120


def test_who_says_stop_ends_the_stretch_for_all_after_the_step_that_was_begun() -> None:
    outcome = simulate(3, deal, [50, 52], lambda rank: 1.0 + rank, lambda comm, done: comm.rank == 2 and len(done) == 4)
    ((first, last),) = {tuple(ends) for _, ends in outcome}
    assert first < 50
    assert micro_batches_of(outcome) == [(step, m) for step in range(last) for m in range(6)]


def test_a_share_that_is_asked_for_early_is_kept() -> None:
    def run(comm):
        dealing = LeaseClient(comm, 4)
        shares = dealing.shares(0, 2, lambda: False)
        one = next(shares), next(shares)  # as a loader that fetches ahead
        assert dealing.upcoming() == one[0]
        dealing.finished()
        assert dealing.upcoming() == one[1]
        dealing.finished()
        following = dealing.upcoming()
        return [*one, following, *shares]

    (shares,) = simulate(1, run)
    assert shares == [(0, range(4)), (1, range(4)), None]


def test_a_worker_takes_its_turn_in_every_step_that_it_is_in_time_for() -> None:
    def run(comm):
        at, done = [0], []
        turns = TakingTurns(comm, range(comm.rank, comm.rank + 1), lambda: at[0])
        for step, mine in turns.shares(3, 10, lambda: False):
            assert mine == range(comm.rank, comm.rank + 1)
            turns.finished()
            at[0] = 7 if comm.rank == 1 and step == 4 else 0
            done.append(step)
        stay(comm)
        return done, turns.dealt

    assert simulate(2, run) == [([3, 4, 5, 6, 7, 8, 9], 10), ([3, 4, 7, 8, 9], 10)]


def test_a_question_from_a_stretch_that_others_have_left_ends_where_that_did() -> None:
    dealer, answers = LeaseServer(4, 2), []
    for stretch, first in ((1, 0), (1, 0), (1, 0), (2, 1), (1, 0), (2, 1)):
        dealer.receive(0, ActorMessage("take", {"stretch": stretch, "first": first, "until": first + 1, "stop": False}),
                       answers.append)  # fmt: skip
    assert [(a.kind, *a.fields.values()) for a in answers] == [
        ("share", 0, 0, 2), ("share", 0, 2, 4), ("over", 1), ("share", 1, 0, 2), ("over", 1), ("share", 1, 2, 4),
    ]  # fmt: skip
