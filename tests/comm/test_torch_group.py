"""What is particular to torch's process groups."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from tests.comm.laws import start_sum
from tests.support.leftovers import open_files, within
from tests.support.processes import run
from unisono.comm import Abort, connect
from unisono.comm.process_sockets import listening_ends
from unisono.comm.rendezvous.directory_store import DirectoryStore
from unisono.comm.rendezvous.prefix_store import PrefixedStore
from unisono.comm.rendezvous.store_exchange import AbortableStore
from unisono.comm.torch_groups.gloo import GlooDevice, connect_gloo
from unisono.comm.torch_groups.process_group import TorchGroup
from unisono.errors import PeerLost


def joined(rank: int, size: int, directory: str, timeout_seconds: float = 20.0) -> Any:
    url = f"file://{directory}"
    return connect(rank, size, rendezvous=url, local_size=size, kind="gloo", timeout_seconds=timeout_seconds)


def stay_apart(rank: int, size: int, directory: str) -> None:
    environment = dict(os.environ)
    comm = joined(rank, size, directory)
    assert not dist.is_initialized()
    assert dict(os.environ) == environment
    comm.close()


def test_the_default_group_and_the_environment_are_left_alone(tmp_path: Path) -> None:
    run(2, stay_apart, str(tmp_path))


def unusual(rank: int, size: int, directory: str) -> None:
    comm = joined(rank, size, directory)
    for dtype in (torch.int16, torch.int8, torch.float8_e4m3fn):
        x = torch.full((2, 2), rank + 1).to(dtype)
        total = comm.sum(x).wait()
        assert total.dtype == dtype
        assert (total.to(torch.float32) == 3).all()
        rows = comm.gather(torch.full((3,), rank + 1).to(dtype)).wait()
        assert rows.to(torch.float32).tolist() == [[1.0] * 3, [2.0] * 3]
    strided = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(comm.sum(strided).wait(), 2 * torch.arange(6.0).view(2, 3).t())
    target = torch.zeros(3, 2).t() + rank
    assert (comm.broadcast(target, root=1).wait() == 1).all()
    assert (target == 1).all()
    comm.close()


def test_dtypes_and_strides_that_gloo_does_not_know(tmp_path: Path) -> None:
    run(2, unusual, str(tmp_path))


def counted(rank: int, size: int, directory: str) -> list[int]:
    comm = joined(rank, size, directory)
    seen, before = [], 0
    for call in (
        lambda: comm.sum(torch.zeros(30)),
        lambda: comm.gather(torch.zeros(10)),
        lambda: comm.broadcast(torch.zeros(10), root=1),
        lambda: comm.exchange([torch.zeros(10)] * 3, [torch.zeros(10)] * 3),
        lambda: comm.swap(*[{1 - rank: torch.zeros(10)} if rank < 2 else {}] * 2),
    ):
        call().wait()
        seen.append(comm.bytes_sent - before)
        before = comm.bytes_sent
    comm.close()
    return seen


def test_bytes_sent(tmp_path: Path) -> None:
    for rank, seen in enumerate(run(3, counted, str(tmp_path))):
        assert seen == [2 * 2 * 120 // 3, 80, 80 if rank == 1 else 0, 80, 40 if rank < 2 else 0]


def leave_nothing(rank: int, size: int, directory: str) -> None:
    # gloo keeps its last device, so what counts is that there are not more of them.
    use_and_close(rank, size, f"{directory}/first")
    files, threads = len(open_files()), len(os.listdir("/proc/self/task"))
    for turn in range(3):
        use_and_close(rank, size, f"{directory}/{turn}")
    # A thread that has done its work may still be on its way out, with what it holds.
    assert within(10, lambda: len(open_files()) <= files), (files, open_files())
    assert within(10, lambda: len(os.listdir("/proc/self/task")) <= threads), threads


def use_and_close(rank: int, size: int, directory: str) -> None:
    comm = joined(rank, size, directory)
    for each in (comm, comm.channel("a")):
        work, good = start_sum(each, torch.float32, (50,))
        assert good(work.wait())
    comm.close()
    with pytest.raises(PeerLost, match="this end was closed"):
        comm.sum(torch.zeros(1)).wait()


def test_descriptors_and_threads_do_not_pile_up(tmp_path: Path) -> None:
    run(2, leave_nothing, str(tmp_path))


def close_in_the_middle(rank: int, size: int, directory: str) -> float:
    """Worker 0 starts what nobody answers, and closes; worker 1 then finds it gone, long before the
    deadline.

    Worker 1 asks only afterwards: two different messages would be a mismatch.
    """
    comm = joined(rank, size, directory, timeout_seconds=50.0)
    comm.gather(torch.zeros(1)).wait()
    closed = Path(directory, "closed")
    if rank == 0:
        began = time.monotonic()
        work = comm.sum(torch.zeros(1000))
        assert not work.poll()
        comm.close()
        closed.touch()
    else:
        while not closed.exists():
            time.sleep(0.001)
        began = time.monotonic()
        work = comm.gather(torch.zeros(3))
    with pytest.raises(PeerLost):
        work.wait()
    comm.close()
    return time.monotonic() - began


def test_close_waits_for_no_peer(tmp_path: Path) -> None:
    assert max(run(2, close_in_the_middle, str(tmp_path))) < 25.0


class Stuck:
    """An operation of a backend that was not woken when its connection broke, and never will be."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: Any = None) -> None:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")


def not_woken(rank: int, size: int, directory: str) -> tuple[str, float]:
    comm = joined(rank, size, directory, timeout_seconds=8.0)
    comm._groups.connections = {0: "socket:[of a peer that is gone]"}
    began = time.monotonic()
    try:
        comm._enqueue("sum", comm._until_complete("sum", comm._groups.track(Stuck()), released=False)).wait()
    except PeerLost as error:
        comm.close()
        return str(error), time.monotonic() - began
    return "", 0.0


def test_a_backend_that_does_not_wake_its_operations_blocks_no_worker(tmp_path: Path) -> None:
    """Neither until the deadline, nor at the end, when torch would wait for them."""
    for text, seconds in run(2, not_woken, str(tmp_path)):
        assert text == "a worker lost during sum: a connection was closed"
        assert 1.0 < seconds < 4.0


def listens() -> set[tuple[str, int]]:
    """Where this process does."""
    return set(listening_ends("127.0.0.1"))


def reached_by_strangers(rank: int, size: int, directory: str) -> int:
    """How many strangers were let in, of four at each place where gloo listens."""
    before = listens()
    comm = joined(rank, size, directory)
    channel = comm.channel("another")
    world = listens() - before
    assert len(world) >= 4
    files, accepted = open_files(), 0
    for end in [*world] * 4:
        with socket.socket() as stranger, suppress(TimeoutError):
            stranger.settimeout(0.05)
            stranger.connect(end)
            accepted += 1
    assert open_files() == files
    for each in (comm, channel):  # who is in stays
        assert each.sum(torch.ones(2)).wait().tolist() == [2.0, 2.0]
    comm.close()
    return accepted


def test_connections_after_the_rendezvous_are_refused(tmp_path: Path) -> None:
    assert run(2, reached_by_strangers, str(tmp_path)) == [0, 0]


def reached_during_rendezvous(rank: int, size: int, directory: str) -> dict[str, int]:
    """By how many of its connections each address reaches where gloo of the first worker listens."""
    store = PrefixedStore("a", DirectoryStore(Path(directory) / "store", 10.0, Abort()))
    if rank == 0:
        with suppress(PeerLost):
            TorchGroup(store, rank, size, timeout_seconds=10.0)
        return {}
    store.set("here/1", json.dumps(["127.0.0.1"]))
    ends = json.loads(store.get("listening/0"))
    reached = dict.fromkeys(("127.0.0.1", "127.0.0.2"), 0)
    for address, (there, port) in itertools.product(reached, ends):
        with suppress(TimeoutError), socket.create_connection((there, port), 0.1, (address, 0)):
            reached[address] += 1
    store.set("listening/1", "no JSON")
    return reached


def test_during_the_rendezvous_only_addresses_of_workers_reach_it(tmp_path: Path) -> None:
    assert run(2, reached_during_rendezvous, str(tmp_path))[1] == {"127.0.0.1": 2, "127.0.0.2": 0}


def garbled(rank: int, size: int, directory: str, words: str) -> str:
    """What the first worker says of a second one, in whose place somebody has written `words`."""
    store = PrefixedStore("a", DirectoryStore(Path(directory) / "store", 10.0, Abort()))
    if rank == 1:
        store.set("listening/1", words)
        store.set("here/1", json.dumps(["127.0.0.1"]))
        return ""
    try:
        TorchGroup(store, rank, size, timeout_seconds=10.0)
    except PeerLost as error:
        return str(error)
    return "it was taken"


@pytest.mark.parametrize(
    "words", ["no JSON {", '{"a": 1}', "[1, 2]", '[["127.0.0.1"]]', '[["127.0.0.1", "x"]]', "[[[], []]]"]
)
def test_a_garbled_place_is_that_of_a_lost_peer(words: str, tmp_path: Path) -> None:
    messages, _ = run(2, garbled, str(tmp_path), words)
    assert messages.startswith("worker 1 lost during connect: its entry in the store is garbled")


class Liar(c10d.Store):
    """A store that gives this worker another word than its peers."""

    def __init__(self, store: c10d.Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return b"another" if key == "secret" else self._store.get(key)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self._store.wait(keys)


def in_anothers_place(rank: int, size: int, directory: str) -> str:
    """What is said by who meets somebody that does not know the word."""
    store = PrefixedStore("a", DirectoryStore(Path(directory) / "store", 10.0, Abort()))
    waiting = AbortableStore(store, 10.0, Abort())
    try:
        connect_gloo(
            Liar(waiting) if rank == 1 else waiting, rank, size, GlooDevice.open("127.0.0.1", ["127.0.0.1"]), 10.0
        )
    except PeerLost as error:
        return str(error)
    return "it was taken for a peer"


def test_a_process_without_the_secret_of_a_group_is_no_peer(tmp_path: Path) -> None:
    messages = run(3, in_anothers_place, str(tmp_path))
    wrong = "another process has connected in its place"
    assert messages == [f"worker 1 lost during connect: {wrong}", f"worker 0, 2 lost during connect: {wrong}",
                    f"worker 1 lost during connect: {wrong}"]  # fmt: skip
