"""Leased work items: each micro-batch goes to one worker, to the end of a step, whatever the workers' speeds."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from unisono.comm import ActorMessage, simulate
from unisono.sync.work_leasing import LeaseClient, LeaseServer, StepGateClient, lease


@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("micro_batches", [1, 2, 6, 7, 12, 64])
def test_a_lease_divides_a_step_and_is_no_more_than_a_workers_part(micro_batches, workers) -> None:
    size = lease(micro_batches, workers)
    assert micro_batches % size == 0
    assert size == 1 or size * workers <= micro_batches
    assert lease(12, 5) == 2


def barrier(comm) -> None:
    """The lease server runs in worker 0, so no worker may leave before all have finished."""
    comm.gather(torch.zeros(1)).wait()


def compute_ranges(comm, ends, seconds, stop=lambda comm, done: False):
    """Compute the items of ranges of steps that shall end at `ends`; the items, and where each range ended."""
    leases, items, ended = LeaseClient(comm, 6), [], []
    first = 0
    for until in ends:
        for step, micro_batches in leases.work_items(first, until, lambda: stop(comm, items)):
            assert leases.upcoming() == (step, micro_batches)
            comm.compute(seconds(comm.rank) / 2)
            leases.prepare()
            comm.compute(seconds(comm.rank) / 2)
            items.append((comm.now(), step, micro_batches))
            assert leases.finished() == (step, micro_batches)
        assert leases.upcoming() is None
        first = leases.leased_until
        ended.append(first)
    barrier(comm)
    return items, ended


def micro_batches_of(outcome) -> list[tuple[int, int]]:
    return sorted((step, m) for items, _ in outcome for _, step, mine in items for m in mine)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_every_micro_batch_is_leased_once_in_order(size, seed) -> None:
    draw = random.Random(seed)
    outcome = simulate(size, compute_ranges, [5, 9, 20], lambda rank: draw.choice([0.1, 1.0, 20.0]))
    assert micro_batches_of(outcome) == [(step, m) for step in range(20) for m in range(6)]
    for items, ended in outcome:
        assert ended == [5, 9, 20]
        assert all(one[1:][0] <= other[1:][0] for one, other in pairwise(items))
    assert len({step for items, _ in outcome for _, step, _ in items}) == 20


def test_a_faster_worker_computes_more() -> None:
    outcome = simulate(3, compute_ranges, [20], {0: 1.0, 1: 1.0, 2: 4.0}.get)
    mine = [sum(len(m) for *_, m in items) for items, _ in outcome]
    assert mine[0] == pytest.approx(4 * mine[2], rel=0.2)
    assert sum(mine) == 120


def test_a_worker_that_stops_ends_the_range_for_all_after_a_step_that_was_begun() -> None:
    stop = lambda comm, done: comm.rank == 2 and len(done) == 4
    outcome = simulate(3, compute_ranges, [50, 52], lambda rank: 1.0 + rank, stop)
    ((first, last),) = {tuple(ended) for _, ended in outcome}
    assert first < 50
    assert micro_batches_of(outcome) == [(step, m) for step in range(last) for m in range(6)]


def test_an_item_that_is_requested_ahead_is_kept() -> None:
    def run(comm):
        leases = LeaseClient(comm, 4)
        items = leases.work_items(0, 2, lambda: False)
        one = next(items), next(items)  # as a loader that fetches ahead
        assert leases.upcoming() == one[0]
        leases.finished()
        assert leases.upcoming() == one[1]
        leases.finished()
        following = leases.upcoming()
        return [*one, following, *items]

    (items,) = simulate(1, run)
    assert items == [(0, range(4)), (1, range(4)), None]


def test_a_step_gate_gives_a_worker_every_step_for_which_it_is_in_time() -> None:
    def run(comm):
        earliest, done = [0], []
        gate = StepGateClient(comm, range(comm.rank, comm.rank + 1), lambda: earliest[0])
        for step, mine in gate.work_items(3, 10, lambda: False):
            assert mine == range(comm.rank, comm.rank + 1)
            gate.finished()
            earliest[0] = 7 if comm.rank == 1 and step == 4 else 0
            done.append(step)
        barrier(comm)
        return done, gate.leased_until

    assert simulate(2, run) == [([3, 4, 5, 6, 7, 8, 9], 10), ([3, 4, 7, 8, 9], 10)]


def test_a_request_of_a_range_that_others_have_left_is_answered_with_its_end() -> None:
    server, answers = LeaseServer(4, 2), []
    for number, first in ((1, 0), (1, 0), (1, 0), (2, 1), (1, 0), (2, 1)):
        server.receive(0, ActorMessage("take", {"stretch": number, "first": first, "until": first + 1, "stop": False}),
                       answers.append)  # fmt: skip
    assert [(a.kind, *a.fields.values()) for a in answers] == [
        ("share", 0, 0, 2), ("share", 0, 2, 4), ("over", 1), ("share", 1, 0, 2), ("over", 1), ("share", 1, 2, 4),
    ]  # fmt: skip
