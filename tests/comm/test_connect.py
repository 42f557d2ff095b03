"""From rank and URL to a communicator, and messages for what cannot work."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comm.laws import start_sum
from tests.support.leftovers import within
from tests.support.processes import run, start
from unisono.comm import Abort, SharedMemory, SingleWorker, TorchGroup, connect
from unisono.comm.rendezvous.address import RendezvousAddress, connect_store, own_address, parse_rendezvous
from unisono.comm.rendezvous.store_exchange import StoreExchange
from unisono.errors import InvalidInput, PeerLost

PROMPT_SECONDS = 20.0


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("file:///private/place", RendezvousAddress(directory="/private/place")),
        ("file:///private/place?attempt=3", RendezvousAddress(directory="/private/place", attempt="3")),
        ("tcp://host:29500", RendezvousAddress(host="host", port=29500)),
        ("tcp://[::1]:80?attempt=2", RendezvousAddress(host="::1", port=80, attempt="2")),
        ("tcp://10.0.0.1:1?served=1", RendezvousAddress(host="10.0.0.1", port=1, served=True)),
    ],
)
def test_rendezvous_urls(url: str, place: RendezvousAddress) -> None:
    assert parse_rendezvous(url) == place


@pytest.mark.parametrize(
    "url",
    [
        "",
        "file://relative/path",
        "tcp://host",
        "tcp://host:99999",
        "tcp://:1",
        "udp://host:1",
        "tcp://h:1?x=1",
    ],
)
def test_what_is_no_rendezvous_url_is_refused_with_a_cure(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"^rendezvous = .*; write file:///") as caught:
        parse_rendezvous(url)
    assert caught.value.value == url


def test_the_own_address_is_the_one_on_the_route_to_the_rendezvous() -> None:
    assert own_address(parse_rendezvous("file:///x")) == "127.0.0.1"
    assert own_address(parse_rendezvous("tcp://localhost:1")) in ("127.0.0.1", "::1")


def test_one_worker_has_no_peers() -> None:
    assert isinstance(connect(0, 1, rendezvous="", local_size=1), SingleWorker)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "pigeons"}, "kind = pigeons: is not a kind of communicator; write one of auto, "),
        ({"kind": "nccl"}, "kind = nccl: cannot send tensors on cpu; write auto or gloo"),
        (
            {"kind": "shared_memory", "local_size": 1},
            "kind = shared_memory: only 1 of 2 workers run on this host; write auto or gloo",
        ),
        ({"rank": 2}, "rank = 2: is not one of the 2 workers; write 0 to 1"),
    ],
)
def test_what_cannot_work_is_refused_before_any_worker_waits(arguments: dict[str, Any], message: str) -> None:
    given = {"rank": 0, "size": 2, "rendezvous": "file:///nowhere", "local_size": 2, **arguments}
    with pytest.raises(InvalidInput) as caught:
        connect(given.pop("rank"), given.pop("size"), **given)
    assert str(caught.value).startswith(message)


def kinds(rank: int, size: int, url: str, local_size: int) -> str:
    comm = connect(rank, size, rendezvous=url, local_size=local_size, timeout_seconds=20)
    work, good = start_sum(comm, torch.float32, (3,))
    assert good(work.wait())
    comm.close()
    return type(comm).__name__


def test_auto_is_shared_memory_on_one_host_and_gloo_on_several(tmp_path: Path) -> None:
    assert run(2, kinds, f"file://{tmp_path}/one", 2) == [SharedMemory.__name__] * 2
    assert run(2, kinds, f"file://{tmp_path}/two", 1) == [TorchGroup.__name__] * 2
    assert os.stat(tmp_path / "one").st_mode & 0o777 == 0o700


def attempts(rank: int, size: int, url: str) -> int:
    """What an earlier attempt left in the store is not seen by a later one."""
    total = 0
    for attempt in range(3):
        comm = connect(rank, size, rendezvous=f"{url}?attempt={attempt}", local_size=1, timeout_seconds=20)
        total += int(comm.sum(torch.tensor([rank + attempt])).wait())
        comm.close()
    return total


def test_a_later_attempt_sees_no_keys_of_an_earlier_one(tmp_path: Path) -> None:
    assert run(2, attempts, f"file://{tmp_path}") == [9, 9]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def over_tcp(rank: int, size: int, port: int, local_size: int) -> list[str]:
    comm = connect(rank, size, rendezvous=f"tcp://127.0.0.1:{port}", local_size=local_size, timeout_seconds=20)
    work, good = start_sum(comm, torch.float32, (3,))
    assert good(work.wait())
    lines = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    mine = {os.readlink(f"/proc/self/fd/{fd}")[8:-1] for fd in descriptors() if is_socket(fd)}
    listening = [line.split() for line in lines.splitlines() if line.split()[3] == "0A"]
    comm.gather(torch.zeros(1)).wait()
    comm.close()
    return [fields[1] for fields in listening if fields[9] in mine]


def descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def is_socket(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")


@pytest.mark.parametrize("local_size", [1, 2])
def test_over_tcp_nothing_listens_beyond_the_given_address(local_size: int) -> None:
    listening = run(2, over_tcp, free_port(), local_size)
    assert listening[0], "worker 0 serves"
    assert all(address.startswith("0100007F:") for worker in listening for address in worker)


def test_a_port_of_another_program_that_answers_nothing_is_named_within_the_deadline() -> None:
    """torch's client itself waits for such a program without end."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PeerLost, match=f"no store is served at 127.0.0.1:{port}: another program accepts"):
            connect(1, 2, rendezvous=f"tcp://127.0.0.1:{port}", local_size=1, timeout_seconds=0.5)


def test_a_port_that_is_taken_is_refused_with_a_cure() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InvalidInput, match=r"worker 0 cannot serve there \(Address already in use\)"):
            connect(0, 2, rendezvous=url, local_size=2)


@pytest.mark.parametrize("kind", ["gloo", "shared_memory"])
def test_a_missing_worker_is_lost_within_the_deadline(kind: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        connect(0, 2, rendezvous=f"file://{tmp_path}", local_size=2, kind=kind, timeout_seconds=0.5)
    assert time.monotonic() - began < 5
    assert caught.value.ranks == (1,)


WRITERS = 4  # each of which is about to write whenever another one is done


def write_until_struck(rank: int, size: int, path: Path, blow: signal.Signals) -> list[str]:
    """Writers say one thing after the other until they are stopped or die; what the others tell each other then."""
    store = connect_store(parse_rendezvous(f"file://{path}/place"), rank, PROMPT_SECONDS, Abort())
    notices = StoreExchange(store, PROMPT_SECONDS, Abort())
    if rank < WRITERS:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), blow)).start()
        for number in itertools.count():
            store.set(f"number {number} of {rank}", "x" * 1000)
    assert within(PROMPT_SECONDS, lambda: (path / "struck").exists())
    return notices.exchange("who", rank - WRITERS, size - WRITERS, rank, int)


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL])
def test_a_worker_that_stops_or_exits_while_it_writes_blocks_no_other(tmp_path: Path, blow: signal.Signals) -> None:
    with start(WRITERS + 2, write_until_struck, tmp_path, blow) as workers:
        writers = workers.processes[:WRITERS]
        assert within(30.0, lambda: all(state_of(writer.pid) in "TZ" for writer in writers))
        (tmp_path / "struck").touch()
        assert workers.results(lost=range(WRITERS))[WRITERS:] == [[WRITERS, WRITERS + 1]] * 2


def state_of(pid: int) -> str:
    """Of a process, by the system's letter; Z if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"
