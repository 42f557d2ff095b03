"""torch's default group: its network, its byte counts, and errors when a peer is lost."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh

from tests.support.leftovers import within
from tests.support.processes import run, start
from unisono.comm import Abort, Rendezvous, TorchWorld, for_attempt, in_blocks
from unisono.comm.process_sockets import listening_ends
from unisono.comm.rendezvous.store_exchange import StoreExchange
from unisono.comm.torch_groups.default_group import STUCK
from unisono.errors import PeerLost

NUMBERS = 1 << 18
BYTES = 4 * NUMBERS
HEADERS = 2000
WHY = "the view is over"
PROMPT_SECONDS = 5.0  # of a machine that has other things to do; far below the deadline
DEADLINE_SECONDS = 60.0


def sent(rank: int, size: int, path: str) -> list[int]:
    """After: connecting; a sum over all; a sum over all in a group made later; what is none of torch's."""
    before = dict(os.environ)
    rendezvous = Rendezvous(rank, in_blocks(size, size), f"file://{path}", "gloo", torch.device("cpu"), 60.0)
    world, numbers = rendezvous.open_world(), torch.ones(NUMBERS)
    own, found = rendezvous.connect(range(size)), []

    def settled() -> int:
        own.gather(torch.zeros(1)).wait()  # else what was sent last may be on its way
        return world.bytes_sent

    found.append(settled())
    dist.all_reduce(numbers)
    found.append(settled())
    dist.all_reduce(numbers, group=dist.new_group(list(range(size))))
    found.append(settled())
    own.sum(numbers.clone()).wait()
    found.append(settled())
    assert numbers.eq(size**2).all()
    assert dict(os.environ) == before
    own.gather(torch.zeros(1)).wait()  # a connection whose far end has closed counts nothing: all read theirs first
    dist.destroy_process_group()
    assert world.bytes_sent == 0
    own.close()
    return found


def test_the_kernel_counts_what_torchs_groups_send(tmp_path) -> None:
    for connected, world, group, own in run(2, sent, str(tmp_path)):
        assert connected < HEADERS
        for a, b in ((connected, world), (world, group)):
            assert BYTES <= b - a < BYTES + HEADERS  # of two workers, each sends half, and then its half of the sum
        assert own == group


def open_world(rank: int, size: int, path: str, view: int, abort: Abort) -> TorchWorld:
    where = for_attempt(f"file://{path}", view)
    device = torch.device("cpu")
    return Rendezvous(rank, ["here"] * size, where, "gloo", device, DEADLINE_SECONDS, abort=abort).open_world()


def stay(rank: int, size: int, path: str) -> None:
    abort = Abort()
    world = Rendezvous(
        rank, ["here"] * size, f"file://{path}", "gloo", torch.device("cpu"), 2.0, abort=abort
    ).open_world()
    dist.all_reduce(torch.ones(1))
    abort.set(WHY)
    if rank:
        world.close()
    threading.Event().wait()


def test_a_worker_that_cannot_be_woken_exits(tmp_path) -> None:
    with start(2, stay, str(tmp_path)) as workers:
        stuck, other = workers.processes
        stuck.join(30)
        assert stuck.exitcode == STUCK
        assert other.is_alive()


def open_world_again(rank: int, size: int, path: str) -> float:
    """Worker 0 was told that a view is over while torch made its group; worker 1 is new."""
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            abort, exchange = Abort(), StoreExchange.exchange

            def break_off(self: StoreExchange, name: str, *rest: Any) -> list[Any]:
                abort.set(WHY)
                return exchange(self, name, *rest)

            patch.setattr(StoreExchange, "exchange", break_off)
            with pytest.raises(PeerLost, match=WHY):
                TorchWorld(HashStore(), 0, size, "127.0.0.1", torch.device("cpu"), DEADLINE_SECONDS, abort)
    world, one = open_world(rank, size, path, 2, Abort()), torch.ones(1)
    dist.all_reduce(one, group=dist.new_group([0, 1]))
    world.close()
    return float(one)


def test_a_group_that_was_not_made_leaves_nothing_behind(tmp_path) -> None:
    """torch counts its groups and names them by their number: all workers have to come to the same."""
    assert run(2, open_world_again, str(tmp_path)) == [2.0, 2.0]


def gather_on_and_on() -> None:
    """Two at a time, as FSDP does."""
    mine, all_of_them = torch.ones(2000), torch.empty(dist.get_world_size() * 2000)
    while True:
        for work in [dist.all_gather_single(all_of_them, mine, async_op=True) for _ in range(2)]:
            work.wait()


def gather_until_aborted(rank: int, size: int, path: str, views: int) -> float:
    """The longest that it took to let go of the groups of `views` views, each broken off somewhere in a gather."""
    chance, longest = random.Random(rank), 0.0
    for view in range(1, views + 1):
        abort, set_at = Abort(), list[float]()
        world = open_world(rank, size, path, view, abort)

        def set_abort(abort: Abort = abort, set_at: list[float] = set_at) -> None:
            set_at.append(time.monotonic())
            abort.set(WHY)

        threading.Timer(chance.uniform(0.002, 0.02), set_abort).start()
        with pytest.raises(PeerLost), world.translate_errors():
            gather_on_and_on()
        longest = max(longest, time.monotonic() - set_at[0]) if set_at else longest
        world.close()
    return longest


def test_no_worker_is_forgotten_in_a_gather_that_all_leave(tmp_path) -> None:
    """As happens where a write fails while gloo answers somebody in its own thread."""
    assert max(run(2, gather_until_aborted, str(tmp_path), 60)) < PROMPT_SECONDS


def test_a_closed_connection_does_not_listen() -> None:
    """Though it has no far end any more, as what listens has none."""
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as here:
        there, _ = door.accept()
        here.sendall(b"unread")
        there.close()  # so its end is not orderly
        with pytest.raises(ConnectionResetError):
            here.recv(1)
        with pytest.raises(OSError, match="not connected"):
            here.getpeername()
        assert listening_ends("127.0.0.1") & {here.getsockname(), door.getsockname()} == {door.getsockname()}


def sockets() -> int:
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except OSError:
            continue  # the listing's own
    return found


def wait(verb: str, group: Any, other: int) -> None:
    """For another worker, as long as it takes part."""
    x = torch.ones(3000)
    while True:
        if verb == "reduce":
            dist.all_reduce(x, group=group)
        elif verb == "functional":
            all_reduce(x, "sum", group).sum().item()
        else:
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, other), dist.P2POp(dist.isend, x, other)]):
                work.wait()


def lose(rank: int, size: int, path: str, verb: str, how: signal.Signals) -> tuple[str, float, int]:
    """What is said when the last worker is lost, how long after it was told, and the sockets that stay open; the others
    meet again."""
    abort, before = Abort(), sockets()
    world = open_world(rank, size, path, 1, abort)
    group = init_device_mesh("cpu", (1, size), mesh_dim_names=("replica", "shard"))["shard"].get_group()
    dist.all_reduce(torch.ones(1), group=group)
    if rank == size - 1:
        os.kill(os.getpid(), how)
    set_at = [time.monotonic()]
    if how == signal.SIGSTOP:  # of which nobody hears anything

        def set_abort() -> None:
            set_at[0] = time.monotonic()
            abort.set(WHY)

        threading.Timer(0.2, set_abort).start()
    with pytest.raises(PeerLost) as caught, world.translate_errors():
        wait(verb, group, size - 1)
    seconds = time.monotonic() - set_at[0]
    world.close()
    again, one = open_world(rank, size - 1, path, 2, Abort()), torch.ones(1)
    dist.all_reduce(one)
    assert one == size - 1
    with pytest.raises(ZeroDivisionError), again.translate_errors():  # what has nothing to do with it stays what it is
        print(1 / 0)
    again.close()
    del group, world, again
    within(10.0, lambda: sockets() - before <= 1)
    return str(caught.value), seconds, sockets() - before


@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("verb", "how"),
    [("reduce", signal.SIGKILL), ("reduce", signal.SIGSTOP), ("functional", signal.SIGSTOP), ("pair", signal.SIGSTOP)],
)
def test_waiting_in_torchs_groups_ends_when_a_worker_is_lost(tmp_path, verb, how) -> None:
    with start(3, lose, str(tmp_path), verb, how) as workers:
        for words, seconds, left in workers.results(lost={2})[:2]:
            assert (WHY if how == signal.SIGSTOP else "a connection was closed") in words
            assert seconds < PROMPT_SECONDS
            assert left <= 1  # what the caught error holds
