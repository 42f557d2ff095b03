"""After the loss of any worker at any time, the survivors hold all shards of one step."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.processes import start
from unisono.checkpoint import Box, TensorShard
from unisono.comm import Abort, Communicator, Rendezvous, for_attempt, simulate
from unisono.elastic.transfer import LocalTensors, MemoryCheckpoints, newest, transfer_tensors
from unisono.elastic.transfer.buddies import buddies
from unisono.errors import PeerLost, StateMissing

SHAPE, ROWS = (12, 50), 12


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=30))
def test_everybody_keeps_one_copy_of_another_host_where_there_is_room(hosts: list[str]) -> None:
    chosen, n = buddies(hosts), len(hosts)
    assert sorted(chosen) == list(range(n))
    assert n == 1 or all(buddy != rank for rank, buddy in enumerate(chosen))
    largest = max(Counter(hosts).values())
    beside = sum(hosts[rank] == hosts[buddy] for rank, buddy in enumerate(chosen))
    assert beside == max(0, 2 * largest - n)


def whole_state(step: int) -> Tensor:
    return (torch.arange(float(SHAPE[0] * SHAPE[1])) * (step + 1)).view(SHAPE)


def part(step: int, rank: int, size: int) -> LocalTensors:
    box = Box.whole(SHAPE).cut(0, ROWS * rank // size, ROWS * (rank + 1) // size)
    return LocalTensors({"weight": whole_state(step)[box.slices()].clone()}, {"weight": box})


PLENTY = 40


def keep(comm: Communicator, polls: list[int]) -> MemoryCheckpoints:
    """Offer the states after three steps; the third is moved on as often as `polls` says for each worker."""
    copies = MemoryCheckpoints(comm.channel("copies"), "h" * comm.size, background=False, round_bytes=400)
    beat = comm.channel("steps")
    for step, moves in ((1, PLENTY), (2, PLENTY), (3, polls[comm.rank])):
        held = part(step, comm.rank, comm.size)
        copies.offer(step, held, {"step": step, "rank": comm.rank})
        held.tensors["weight"].zero_()  # training goes on
        for count in range(PLENTY):
            if count < moves:
                copies.poll()
            beat.gather(torch.zeros(1)).wait()
        assert copies.ready or step == 3
    return copies


def take(comm: Communicator, left: list[MemoryCheckpoints]) -> tuple[int | None, Tensor]:
    """Those who are left, and somebody new who takes what there is."""
    copies = left[comm.rank] if comm.rank < len(left) else None
    step = newest(comm, copies)
    assert step is not None
    here = [kept.held for kept in copies.at(step)] if copies else []
    wanted = {} if copies else {"weight": TensorShard(torch.float32, Box.whole(SHAPE))}
    return step, transfer_tensors(comm, here, wanted).get("weight", torch.empty(0))


def lost_at(polls: list[int], lost: int) -> tuple[int, Tensor]:
    """The step that those who are left go back to, and its state as somebody new takes it."""
    all_ = simulate(len(polls), keep, polls)
    for rank, copies in enumerate(all_):
        for step in copies.steps():
            own, kept = copies.at(step)
            assert (own.owner, kept.owner) == (rank, copies.owner)
            assert own.meta == {"step": step, "rank": rank}
            assert kept.meta == {"step": step, "rank": copies.owner}
    left = [copies for rank, copies in enumerate(all_) if rank != lost]
    *_, (step, found) = simulate(len(polls), take, left)
    assert step is not None
    return step, found


@settings(max_examples=40)
@given(st.lists(st.integers(0, PLENTY), min_size=2, max_size=4), st.data())
def test_whoever_is_lost_at_whatever_moment_one_step_is_whole(polls: list[int], data: st.DataObject) -> None:
    step, found = lost_at(polls, data.draw(st.integers(0, len(polls) - 1)))
    assert step in (2, 3)
    assert torch.equal(found, whole_state(step))


def test_what_has_arrived_everywhere_is_what_is_taken() -> None:
    assert lost_at([PLENTY] * 3, 1)[0] == 3
    assert lost_at([PLENTY, 0, PLENTY], 1)[0] == 2


class Lying:
    """A communicator that changes a byte of what worker 1 sends."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.lies = comm, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def exchange(self, xs: Any, like: Any) -> Any:
        for x in xs:
            if self.lies and self.rank == 1 and x.numel():
                x[0] ^= 1
        return self._comm.exchange(xs, like)


def lie_once(comm: Communicator) -> list[list[int]]:
    lane = Lying(comm.channel("copies"))
    copies, found = MemoryCheckpoints(lane, "hhh", background=False), []
    for step in (1, 2, 3):
        lane.lies = step == 2
        copies.offer(step, part(step, comm.rank, 3))
        while not copies.poll():
            pass
        found.append(copies.steps())
    return found


def test_a_damaged_copy_is_not_kept_and_the_former_is(caplog: pytest.LogCaptureFixture) -> None:
    assert simulate(3, lie_once) == [[[1], [1], [3]]] * 3
    assert "of step 2 arrived with other bytes" in caplog.text


def neighbours_lost(comm: Communicator, left: list[MemoryCheckpoints]) -> str:
    with pytest.raises(StateMissing) as caught:
        take(comm, left)
    return str(caught.value)


def test_who_is_lost_with_their_keeper_is_missed_by_name() -> None:
    left = simulate(4, keep, [PLENTY] * 4)
    lost = {0, left[0].buddy}
    texts = simulate(3, neighbours_lost, [copies for rank, copies in enumerate(left) if rank not in lost])
    assert texts == ["no worker has weight [0:3, 0:50] of [12, 50]"] * 3


# Real workers.


def go_on(rank: int, size: int, kind: str, hosts: str, url: str) -> Any:
    """Worker 2 dies as soon as it has offered its state; the others go back to the newest step that is whole."""
    abort, device = Abort(), torch.device("cpu")
    comm = Rendezvous(rank, hosts, for_attempt(url, 1), kind, device, 60.0, abort=abort).connect(range(size))
    copies = MemoryCheckpoints(comm.channel("copies"), hosts, round_bytes=500)
    for step in range(1, 6):
        copies.offer(step, part(step, rank, size), {"step": step})
        comm.gather(torch.zeros(1)).wait()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost):
        comm.gather(torch.zeros(1)).wait()
    abort.set("worker 2 is gone")
    copies.close()
    comm.close()
    again = Rendezvous(rank, hosts[:2], for_attempt(url, 2), kind, device, 60.0).connect(range(2))
    step = newest(again, copies)
    assert step is not None
    found = transfer_tensors(
        again, [kept.held for kept in copies.at(step)], {"weight": TensorShard(torch.float32, Box.whole(SHAPE))}
    )
    again.close()
    return step, torch.equal(found["weight"], whole_state(step))


@pytest.mark.parametrize(("kind", "hosts"), [("shared_memory", "hhh"), ("gloo", "hhh"), ("auto", "ijj")])
def test_real_workers_go_back_to_a_step_that_is_whole(kind: str, hosts: str, tmp_path: Path) -> None:
    with start(3, go_on, kind, hosts, f"file://{tmp_path}/place") as workers:
        results = workers.results(lost={2})
    assert results[0] == results[1]
    assert results[0] in [(4, True), (5, True)]
