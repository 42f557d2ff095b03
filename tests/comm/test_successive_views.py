"""One process in many views, one after another: it connects, leaves, and leaks nothing."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comm.laws import start_sum
from tests.comm.test_abort import DEADLINE_SECONDS, PROMPT_SECONDS, WHY
from tests.support.leftovers import mappings, open_files, within
from tests.support.processes import run, start
from unisono.comm import (
    Abort,
    Rendezvous,
    RendezvousStore,
    Security,
    SharedMemory,
    TorchGroup,
    for_attempt,
    host_name,
    open_store,
)
from unisono.comm.rendezvous.address import parse_rendezvous
from unisono.comm.rendezvous.store_exchange import StoreExchange
from unisono.comm.torch_groups.backend_groups import BackendGroups
from unisono.errors import InvalidInput, PeerLost

CPU = torch.device("cpu")
TOKEN = "a token that the run's workers know"


def meet(rank: int, hosts: Sequence[str], url: str, kind: str = "auto", abort: Abort | None = None) -> Any:
    meeting = Rendezvous(rank, hosts, url, kind, CPU, DEADLINE_SECONDS, abort=abort, security=Security(TOKEN))
    return meeting.connect(range(len(hosts)))


# Hosts.


def tiers_of(rank: int, size: int, hosts: str, url: str) -> Any:
    comm = meet(rank, list(hosts), url)
    work, good = start_sum(comm, torch.float32, (5,))
    assert good(work.wait())
    tiers, name = comm.hierarchy("t"), type(comm).__name__
    within_host = None
    if tiers:
        within_host = tiers.intra_node.gather(torch.tensor([rank])).wait().view(-1).tolist()
        if tiers.inter_node:
            within_host.append(tiers.inter_node.gather(torch.tensor([rank])).wait().view(-1).tolist())
    comm.gather(torch.zeros(1)).wait()
    comm.close()
    return name, within_host


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aabb", [[0, 1, [0, 2]], [0, 1], [2, 3, [0, 2]], [2, 3]]),
        ("abba", [[0, 3, [0, 1]], [1, 2, [0, 1]], [1, 2], [0, 3]]),
        ("aab", [None] * 3),  # one crosses the network as often as the other
        ("ab", [None] * 2),
    ],
)
def test_who_shares_a_host_need_not_be_neighbours(hosts: str, expected: list[Any], tmp_path: Path) -> None:
    results = run(len(hosts), tiers_of, hosts, f"file://{tmp_path}/place")
    assert results == [(TorchGroup.__name__, each) for each in expected]


def test_all_on_one_host_share_memory_and_others_cannot(tmp_path: Path) -> None:
    assert run(2, tiers_of, "aa", f"file://{tmp_path}/place") == [(SharedMemory.__name__, None)] * 2
    with pytest.raises(InvalidInput, match="only 2 of 3 workers run on this host"):
        Rendezvous(0, list("aba"), "file:///nowhere", "shared_memory", CPU, 1.0)


# Doors.


def test_a_place_of_all_is_everybodys_door() -> None:
    store = open_store("file:///private/place", "http://127.0.0.1:80", TOKEN)
    assert store.url == "file:///private/place"
    store.close()
    for meets_at, towards in (("nowhere", "http://h:1"), ("", "no url")):
        with pytest.raises(InvalidInput):
            open_store(meets_at, towards, TOKEN)


@pytest.mark.parametrize(
    ("url", "expected"),
    [("file:///d", "file:///d?attempt=17"), ("tcp://h:1?served=1", "tcp://h:1?served=1&attempt=17")],
)
def test_a_place_has_many_times(url: str, expected: str) -> None:
    assert for_attempt(url, 17) == expected
    assert parse_rendezvous(expected).attempt == "17"


def through_doors(rank: int, size: int, directory: Path) -> list[str]:
    """Each opens a door; they meet at each of them, in turn."""
    store = open_store("", "http://127.0.0.1:9", TOKEN)
    (directory / f"door-{rank}").write_text(store.url)
    assert within(DEADLINE_SECONDS, lambda: len([f for f in directory.glob("door-*") if f.read_text()]) == size)
    stores = [(directory / f"door-{each}").read_text() for each in range(size)]
    for number, url in enumerate(stores * 2):
        comm = meet((rank - number) % size, ["a"] * size, for_attempt(url, number), "gloo")
        work, good = start_sum(comm, torch.float32, (5,))
        assert good(work.wait())
        comm.gather(torch.zeros(1)).wait()
        comm.close()
    (directory / f"done-{rank}").touch()
    assert within(DEADLINE_SECONDS, lambda: len(list(directory.glob("done-*"))) == size)
    store.close()
    store.close()
    return stores


def test_workers_meet_at_the_door_of_any_of_them(tmp_path: Path) -> None:
    for stores in run(2, through_doors, tmp_path):
        assert all(url.startswith("tcp://127.0.0.1:") and url.endswith("?served=1") for url in stores)


def hosts_name(rank: int, size: int) -> str:
    return host_name()


def test_processes_of_one_host_and_user_call_it_alike() -> None:
    assert set(run(2, hosts_name)) == {host_name()}
    assert len(host_name()) == 16


# Meetings that come to nothing.


def stop_at(moment: str, blow: int) -> None:
    """Have this worker stop or die at that moment of the next meeting."""

    def fall(*args: Any, **keywords: Any) -> None:
        os.kill(os.getpid(), blow)

    if moment == "never comes":
        fall()
    said = StoreExchange.publish

    def say_and_fall(self: StoreExchange, key: str, value: Any) -> None:
        said(self, key, value)
        fall()

    if moment == "says where it is":
        StoreExchange.publish = say_and_fall  # type: ignore[method-assign]
    BackendGroups._connect = fall  # type: ignore[method-assign, assignment]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def what_is_left() -> Counter[str]:
    """What this process has open and what runs in it."""
    gc.collect()  # channels and their set refer to each other
    left = Counter(re.sub(r"\d+", "", each) for each in open_files().values())
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has just ended
            left[Path(f"/proc/self/task/{task}/comm").read_text().strip()] += 1
    return left


def place_of_all(rank: int, lost: int, through: str, directory: Path) -> str:
    """A directory, or the door of the worker that will be lost."""
    if through == "directory":
        return f"file://{directory}/place"
    told = directory / "door"
    if rank == lost:
        DOORS.append(open_store("", "http://127.0.0.1:9", TOKEN))
        (directory / "being told").write_text(DOORS[0].url)
        (directory / "being told").rename(told)
    assert within(DEADLINE_SECONDS, told.exists)
    return told.read_text()


DOORS: list[RendezvousStore] = []  # of this process


def meet_the_lost(rank: int, size: int, lost: int, kind: str, through: str, moment: str, blow: int, at: Path) -> Any:
    """What was raised, how long after it was broken off, and whether nothing is left."""
    url, hosts = place_of_all(rank, lost, through, at), ["a"] * size
    meet(rank, hosts, for_attempt(url, 1), kind).close()  # libraries start and open what they keep
    gc.collect()
    before, abort, told, comm = what_is_left(), Abort(), list[float](), None

    def break_off() -> None:
        assert within(DEADLINE_SECONDS, (at / "lost").exists)
        time.sleep(0.3)  # for the others to get as far as they can
        told.append(time.monotonic())
        abort.set(WHY)

    if rank == lost:
        (at / "lost").touch()
        stop_at(moment, blow)
    breaking = threading.Thread(target=break_off)
    breaking.start()
    with pytest.raises(PeerLost) as caught:  # noqa: PT012 (one of both)
        comm = meet(rank, hosts, for_attempt(url, 2), kind, abort)
        comm.gather(torch.zeros(1)).wait()
    seconds = time.monotonic() - told[0] if told else 0.0  # a peer that is dead may be missed before
    breaking.join()
    if comm is not None:
        comm.close()
    said = str(caught.value)
    del caught, comm

    within(20.0, lambda: not what_is_left() - before)
    return said, seconds, what_is_left() - before


MEETINGS = [
    *(("gloo", "directory", moment, "SIGSTOP") for moment in ("never comes", "says where it is", "connects")),
    *(("shared_memory", "directory", moment, "SIGSTOP") for moment in ("never comes", "says where it is")),
    *(("gloo", "door", moment, "SIGSTOP") for moment in ("never comes", "connects")),
    ("gloo", "directory", "connects", "SIGKILL"),
    ("shared_memory", "directory", "says where it is", "SIGKILL"),
    ("gloo", "door", "connects", "SIGKILL"),
]


@pytest.mark.short(3)
@pytest.mark.parametrize(("kind", "through", "moment", "blow"), MEETINGS)
def test_a_meeting_without_one_can_be_broken_off(
    kind: str, through: str, moment: str, blow: str, tmp_path: Path
) -> None:
    lost = 0 if through == "door" else 2
    with start(3, meet_the_lost, lost, kind, through, moment, signal.Signals[blow], tmp_path) as workers:
        results = workers.results(lost={lost})
    for text, seconds, more in [result for result in results if result is not None]:
        assert WHY in text or "another worker found it lost" in text or blow == "SIGKILL"
        assert seconds < PROMPT_SECONDS
        assert not more


# Many.


def many_views(rank: int, size: int, kind: str, url: str, views: int) -> Any:
    """How long it took to close a view; after the last this process has no more open than after the third."""
    left, seconds = (0, 0, 0), list[float]()

    def here() -> tuple[int, int, int]:
        return len(open_files()), threads(), len(mappings())

    for number in range(1, views + 1):
        abort = Abort()
        comm = meet(rank, ["a"] * size, for_attempt(url, number), kind, abort)
        channel, x = comm.channel("a"), comm.allocate(1000, torch.float32)
        work, good = start_sum(channel, torch.float32, (50,))
        assert good(work.wait())
        comm.gather(torch.zeros(1)).wait()
        timer = threading.Timer(0.01, abort.set, [WHY])
        timer.start()
        if rank == 0:
            timer.join()  # it begins nothing more, for which the others wait
        with pytest.raises(PeerLost):
            comm.sum(x).wait()
        timer.join()
        began = time.monotonic()
        comm.close()
        seconds.append(time.monotonic() - began)
        del comm, channel, x, work, good
        gc.collect()
        if number == 3:  # libraries start and open what they keep; a thread that was joined may not have ended yet
            left = here()
    assert within(10.0, lambda: all(now <= then for now, then in zip(here(), left, strict=True))), (here(), left)
    return sorted(seconds)[views // 2]


@pytest.mark.parametrize(("kind", "views"), [("gloo", 30), ("shared_memory", 50)])
def test_many_views_leave_nothing(kind: str, views: int, tmp_path: Path) -> None:
    for median_seconds in run(2, many_views, kind, f"file://{tmp_path}/place", views):
        assert median_seconds < PROMPT_SECONDS
    assert [path.name for path in tmp_path.glob("place/*")] == [f"store-{views}"]
