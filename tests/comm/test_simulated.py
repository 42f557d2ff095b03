"""The simulated communicator: results, clock, determinism, lost peers, and no deadlock."""

from __future__ import annotations

import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.comm import Link, Lost, Simulated, outcomes, simulate
from unisono.comm.link_model import CONTENTION, exchange_seconds, gather_seconds, sum_seconds
from unisono.errors import MessageMismatch, PeerLost

SLOW = Link(bytes_per_second=1e3, latency_seconds=0.5)


def neighbours(comm):
    return sorted({(comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size} - {comm.rank})


VERBS = {
    "sum": lambda comm: comm.sum(torch.full((3,), comm.rank + 1.0)),
    "gather": lambda comm: comm.gather(torch.tensor([comm.rank, 7])),
    "broadcast": lambda comm: comm.broadcast(torch.full((2, 2), float(comm.rank)), root=comm.size - 1),
    "exchange": lambda comm: comm.exchange(
        [torch.full((r + 1,), 10 * comm.rank + r) for r in range(comm.size)],
        [torch.zeros(comm.rank + 1, dtype=torch.int64)] * comm.size,
    ),
    "swap": lambda comm: comm.swap(
        {r: torch.tensor([10 * comm.rank + r]) for r in neighbours(comm)},
        {r: torch.zeros(1, dtype=torch.int64) for r in neighbours(comm)},
    ),
}
EXPECTED = {
    "sum": lambda rank, n: torch.full((3,), n * (n + 1) / 2),
    "gather": lambda rank, n: torch.tensor([[r, 7] for r in range(n)]),
    "broadcast": lambda rank, n: torch.full((2, 2), n - 1.0),
    "exchange": lambda rank, n: [torch.full((rank + 1,), 10 * r + rank) for r in range(n)],
    "swap": lambda rank, n: {r: torch.tensor([10 * r + rank]) for r in {(rank - 1) % n, (rank + 1) % n} - {rank}},
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_verb_gives_what_the_contract_says(verb, size):
    for rank, result in enumerate(simulate(size, lambda comm: VERBS[verb](comm).wait())):
        assert same(result, EXPECTED[verb](rank, size))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3), (0, 4)])
def test_sum_carries_every_dtype_and_shape(dtype, shape):
    def worker(comm):
        x = torch.full(shape, comm.rank + 1, dtype=dtype)
        return comm.sum(x).wait(), comm.gather(torch.full(shape, comm.rank, dtype=dtype)).wait()

    for total, rows in simulate(3, worker):
        assert same(total, torch.full(shape, 6, dtype=dtype))
        assert rows.shape == (3, *shape)


def test_sum_is_added_in_the_order_of_ranks_whoever_comes_first():
    parts = [1e8, 1.0, -1e8, 1.0]

    def worker(comm, late):
        comm.compute(late[comm.rank])
        return comm.sum(torch.tensor([parts[comm.rank]])).wait().item()

    in_order = ((torch.tensor(parts[0]) + parts[1]) + parts[2] + parts[3]).item()
    for late in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        assert set(simulate(4, worker, late)) == {in_order}


def test_what_was_summed_holds_noise_and_what_was_gathered_is_unchanged():
    def worker(comm):
        x, y = torch.ones(2), torch.ones(2)
        comm.sum(x).wait(), comm.gather(y).wait()
        return bool(x.isnan().all()), y.tolist()

    assert simulate(2, worker) == [(True, [1, 1])] * 2


def test_channels_are_independent():
    def worker(comm):
        a, b = comm.channel("a"), comm.channel("b")
        first, second = (a, b) if comm.rank else (b, a)
        works = {channel: channel.sum(torch.tensor([float(channel is a)])) for channel in (first, second)}
        return works[a].wait().item(), works[b].wait().item()

    assert simulate(3, worker) == [(3, 0)] * 3


def test_clock_moves_by_the_cost_model_only():
    def worker(comm):
        comm.compute(float(comm.rank))
        work = comm.sum(torch.zeros(100))
        assert comm.now() == comm.rank
        work.wait()
        return comm.now()

    seconds = sum_seconds([SLOW] * 3, 400)
    assert seconds == pytest.approx(4 * (0.5 + 400 / 3 / 1e3))
    assert simulate(3, worker, link=SLOW) == [2 + seconds] * 3


def test_a_slow_link_slows_the_ring_and_messages_of_a_link_follow_each_other():
    def worker(comm):
        works = [comm.gather(torch.zeros(10)) for _ in range(3)]
        return [(work.wait(), comm.now())[1] for work in works]

    one = gather_seconds([Link(), SLOW], 40)
    assert one == pytest.approx(0.54)
    assert simulate(2, worker, link=[Link(), SLOW]) == [pytest.approx([one, 2 * one, 3 * one])] * 2


def test_exchange_costs_what_the_busiest_link_carries():
    links = {0: SLOW, 1: Link(1e6, 0.0), 2: Link(1e6, 0.0)}
    assert exchange_seconds(links, {(1, 0): 1000, (2, 0): 500, (0, 0): 9e9}) == pytest.approx(0.5 + CONTENTION * 1.5)
    assert exchange_seconds(links, {(1, 0): 1000}) == pytest.approx(0.5 + 1.0)  # alone on the link
    assert exchange_seconds(links, {(0, 0): 9e9}) == 0.0


def test_poll_is_true_only_when_the_clock_has_reached_the_finish():
    def worker(comm):
        work = comm.sum(torch.zeros(100))
        before = work.poll()
        comm.compute(1.0)
        between = work.poll()
        comm.compute(1.0)
        return before, between, work.poll(), comm.now()

    assert simulate(2, worker, link=SLOW) == [(False, False, True, 2.0)] * 2  # costs 2 * (0.5 + 0.2)


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_polling_in_a_loop_ends(seconds):
    def worker(comm):
        works = [comm.sum(torch.zeros(4)) for _ in range(2)]
        comm.compute(1.0 * comm.rank)
        polls = 0
        while not all(work.poll() for work in works):
            comm.compute(seconds)
            polls += 1
        return polls

    assert all(0 < polls < 20 for polls in simulate(3, worker, link=SLOW))


def test_bytes_sent_follow_the_algorithms():
    def worker(comm):
        counts = []
        for verb in VERBS:
            before = comm.bytes_sent
            VERBS[verb](comm.channel("other")).wait()
            counts.append(comm.bytes_sent - before)
        return counts

    # sum 12 bytes, gather 16 bytes, broadcast 16 bytes from the last, exchange 8 * (r + 1), swap 8 to each
    assert simulate(4, worker)[3] == [2 * 3 * 12 // 4, 3 * 16, 3 * 16, 8 * (1 + 2 + 3), 2 * 8]


def story(comm: Simulated, events: list) -> None:
    works = []
    for step in range(4):
        comm.compute(random.random())
        works.append(VERBS[random.Random(step).choice(list(VERBS))](comm))
        events.append((comm.rank, comm.now(), torch.rand(()).item()))
        if random.random() < 0.5:
            works.pop().wait()
        events.append((comm.rank, comm.now(), works[0].poll() if works else None))
    for work in works:
        work.wait()
    events.append((comm.rank, comm.now(), "end"))


@settings(max_examples=15)
@given(size=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_same_seed_same_clock_and_same_order_of_events(size, seed):
    first, second, other = [], [], []
    simulate(size, story, first, link=SLOW, seed=seed)
    simulate(size, story, second, link=SLOW, seed=seed)
    simulate(size, story, other, link=SLOW, seed=seed + 1)
    assert first == second
    assert first != other
    starts = [event[1] for event in first]
    assert starts == sorted(starts)  # things happen in the order of virtual time


def test_random_generators_belong_to_each_worker_and_the_caller_keeps_its_own():
    def worker(comm):
        torch.manual_seed(comm.rank)
        draws = []
        for _ in range(3):
            draws.append(torch.rand(()).item())
            comm.sum(torch.zeros(1)).wait()
        return draws

    torch.manual_seed(5)
    before = torch.get_rng_state()
    together = simulate(3, worker)
    assert torch.equal(torch.get_rng_state(), before)
    assert together == [simulate(rank + 1, worker)[rank] for rank in range(3)]
    assert len({tuple(draws) for draws in together}) == 3


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_failure_is_peer_lost_for_the_others_now_and_later(verb, lost):
    def worker(comm):
        if comm.rank == lost:
            comm.compute(1.0)
            raise KeyError("mine")
        with pytest.raises(PeerLost) as now:
            VERBS[verb](comm).wait()
        with pytest.raises(PeerLost) as later:
            VERBS[verb](comm.channel("other")).wait()
        return now.value.ranks, later.value.ranks, now.value.during, comm.now()

    results = outcomes(3, worker)
    assert isinstance(results[lost], KeyError)
    assert [results[r] for r in range(3) if r != lost] == [((lost,), (lost,), verb, 1.0)] * 2


def test_simulate_raises_the_first_failure_by_virtual_time():
    def worker(comm):
        comm.compute(3.0 - comm.rank)
        raise ValueError(comm.rank)

    with pytest.raises(ValueError, match="2"):
        simulate(3, worker)


def test_losing_another_worker_ends_it_at_its_next_verb_and_breaks_what_is_under_way():
    def worker(comm):
        work = comm.sum(torch.ones(100))
        if comm.rank == 0:
            comm.compute(0.1)
            comm.world.lose(1)
        try:
            work.wait()
        except Exception as error:
            return error, comm.now()

    survivor, lost, third = outcomes(3, worker, link=SLOW)
    assert isinstance(lost, Lost)
    for error, when in (survivor, third):
        assert isinstance(error, PeerLost)
        assert (error.ranks, when) == ((1,), 0.1)


def test_what_a_worker_has_started_arrives_although_it_ends_or_closes():
    def worker(comm):
        work = comm.sum(torch.ones(1))
        if comm.rank == 1:
            comm.close()
            comm.close()
            return None
        total = work.wait().item()
        with pytest.raises(PeerLost, match="worker 1 lost during sum: it has closed"):
            comm.sum(torch.ones(1)).wait()
        return total

    assert simulate(3, worker) == [3.0, None, 3.0]


MISMATCHES = {
    "verb": lambda comm: comm.gather(torch.ones(4)) if comm.rank == 1 else comm.sum(torch.ones(4)),
    "size": lambda comm: comm.sum(torch.ones(4 + (comm.rank == 1))),
    "dtype": lambda comm: comm.sum(torch.ones(4, dtype=torch.int64 if comm.rank == 1 else torch.float32)),
    "root": lambda comm: comm.broadcast(torch.ones(4), root=int(comm.rank == 1)),
    "pair": lambda comm: comm.exchange(
        [torch.ones(1)] * comm.size, [torch.ones(1 + (comm.rank == 1 and r == 0)) for r in range(comm.size)]
    ),
    "neighbour": lambda comm: comm.swap(*({r: torch.ones(1) for r in ([], [0], [0, 1])[comm.rank]} for _ in range(2))),
}


@pytest.mark.parametrize("what", ["verb", "size", "dtype", "root", "pair"])
def test_a_mismatch_names_both_sides_to_all(what):
    for error in outcomes(3, lambda comm: MISMATCHES[what](comm).wait()):
        assert isinstance(error, MessageMismatch)
        assert "worker 0" in str(error)
        assert "worker 1" in str(error)
        assert "message 0" in str(error)


def test_a_neighbour_that_does_not_know_of_the_swap_is_a_mismatch():
    errors = outcomes(3, lambda comm: MISMATCHES["neighbour"](comm).wait())
    assert errors[0] == {}
    assert "worker 0: message 0: swap of nothing to worker 1" in str(errors[1])
    assert errors[2].ranks == (1,)  # which had failed by then


def test_all_workers_see_a_deadlock():
    def worker(comm):
        a, b = comm.channel("a"), comm.channel("b")
        (b if comm.rank == 1 else a).sum(torch.ones(3)).wait()

    for error in outcomes(3, worker):
        assert isinstance(error, MessageMismatch)
        assert "workers 0, 2 wait in message 0: sum of 3 x float32 on channel a" in str(error)
        assert "worker 1 waits in message 0: sum of 3 x float32 on channel b" in str(error)


@pytest.mark.parametrize("polls", [False, True])
def test_a_silent_peer_is_lost_after_the_deadline(polls):
    def worker(comm):
        if comm.rank == 2:
            comm.compute(50.0)
            return None
        work = comm.sum(torch.ones(1))
        while polls and not work.poll():
            comm.compute(0.5)
        with pytest.raises(PeerLost, match="no answer within the deadline of 10 s") as error:
            work.wait()
        return error.value.ranks, comm.now()

    assert simulate(3, worker, timeout_seconds=10.0)[:2] == [((2,), 10.0)] * 2


def test_a_slow_peer_is_waited_for_without_a_deadline():
    def worker(comm):
        comm.wait_without_deadline()
        comm.compute(50.0 * comm.rank)
        return comm.sum(torch.ones(1)).wait().item()

    assert simulate(3, worker, timeout_seconds=10.0) == [3.0] * 3


def test_bad_arguments_are_named():
    def worker(comm):
        for wrong in (
            lambda: comm.broadcast(torch.ones(1), root=2),
            lambda: comm.exchange([torch.ones(1)], [torch.ones(1)]),
            lambda: comm.swap({comm.rank: torch.ones(1)}, {comm.rank: torch.ones(1)}),
            lambda: comm.compute(-1.0),
        ):
            with pytest.raises(ValueError):
                wrong()

    simulate(2, worker)
    for link in ({"bytes_per_second": 0.0}, {"latency_seconds": -1.0}):
        with pytest.raises(ValueError):
            Link(**link)
    with pytest.raises(ValueError):
        simulate(3, worker, link=[Link()])


def test_256_workers_and_50_sums_take_seconds_and_no_real_waiting():
    def worker(comm):
        for _ in range(50):
            total = comm.sum(torch.full((8,), float(comm.rank))).wait()
        return total[0].item()

    began = time.process_time()
    assert set(simulate(256, worker, link=SLOW)) == {255 * 256 / 2}
    assert time.process_time() - began < 20.0
