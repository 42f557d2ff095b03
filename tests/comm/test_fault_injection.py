"""Injected communication failures."""

from __future__ import annotations

import multiprocessing
import signal

import pytest
import torch

from tests.comm.test_simulated import VERBS
from unisono.comm import Delay, Faulty, InjectedFailure, Lost, outcomes, simulate
from unisono.errors import PeerLost


def steps(comm, faults, verbs):
    comm = Faulty(comm, faults)
    done = 0
    try:
        for verb in verbs:
            VERBS[verb](comm).wait()
            done += 1
    except PeerLost as error:
        return done, error.ranks
    return done, ()


@pytest.mark.parametrize("verb", [*VERBS, "*"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_fault_is_injected_at_the_counted_start(verb, count, rank):
    verbs = ["sum", "gather", "broadcast", "exchange", "swap"] * 3
    at = count - 1 if verb == "*" else [i for i, each in enumerate(verbs) if each == verb][count - 1]
    results = outcomes(3, steps, [InjectedFailure(rank, verb, count)], verbs)
    assert isinstance(results[rank], Lost)
    assert [results[r] for r in range(3) if r != rank] == [(at, (rank,))] * 2


def test_without_a_fault_nothing_changes():
    assert simulate(3, steps, [], list(VERBS)) == [(5, ())] * 3
    assert simulate(3, steps, [InjectedFailure(rank=1, count=2)], list(VERBS)) == [(5, ())] * 3


def test_channels_count_together_and_the_rest_is_passed_through():
    def worker(comm):
        faulty = Faulty(comm, [Delay(rank=1, verb="sum", count=2, seconds=4.0)])
        channel = faulty.channel("second")
        channel.sum(torch.zeros(1)).wait()
        before = faulty.now()
        faulty.sum(torch.zeros(1)).wait()
        assert faulty.bytes_sent == comm.bytes_sent > 0
        assert faulty.allocate(3, torch.int32).tolist() == [0, 0, 0]
        faulty.close()
        return round(faulty.now() - before)

    assert simulate(2, worker) == [4, 4]


def test_two_lost_one_after_the_other():
    def worker(comm):
        comm = Faulty(comm, [InjectedFailure(0, "sum", 2), InjectedFailure(1, "*", 3)])
        lost = []
        for _ in range(3):
            comm.compute(1.0)
            try:
                comm.sum(torch.zeros(1)).wait()
            except PeerLost as error:
                lost.append(error.ranks)
        return lost

    results = outcomes(3, worker)
    assert [type(result) for result in results] == [Lost, Lost, list]
    assert results[2] == [(0,), (0, 1)]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: InjectedFailure(0, "add"),
        lambda: InjectedFailure(0, count=0),
        lambda: InjectedFailure(0, how="nicely"),
        lambda: Delay(0, seconds=-1.0),
    ],
)
def test_faults_are_checked(wrong):
    with pytest.raises(ValueError):
        wrong()


def kill_itself():
    simulate(1, lambda comm: Faulty(comm, [InjectedFailure(0, how="kill")]).sum(torch.zeros(1)))


def test_kill_ends_the_process():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "unisono.comm"])
    process = context.Process(target=kill_itself)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
