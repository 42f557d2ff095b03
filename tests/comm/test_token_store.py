"""A rendezvous store on a public address, which only holders of the run's token can use."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
import torch

from tests.support.actors import Echo
from tests.support.leftovers import within
from tests.support.processes import run
from unisono.comm import Abort, Rendezvous, Security, for_attempt, in_blocks, open_store
from unisono.comm.actors.listener import ListeningSockets, listen
from unisono.comm.rendezvous.prefix_store import PrefixedStore
from unisono.comm.rendezvous.token_store import StoreServer, TokenStore
from unisono.errors import PeerLost

TOKEN = "a token that the run's workers know"


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with closing(StoreServer("127.0.0.1", TOKEN)) as made:
        yield made


def reached(
    server: StoreServer, token: str = TOKEN, timeout_seconds: float = 20.0, abort: Abort | None = None
) -> TokenStore:
    return TokenStore("127.0.0.1", server.port, token, timeout_seconds, abort or Abort())


def test_what_one_has_written_another_reads(server: StoreServer) -> None:
    ours, theirs = reached(server), reached(server)
    for value in (b"", b"10.0.0.1:4000", bytes(range(256)) * 400):
        ours.set("key", value)  # type: ignore[arg-type]
        assert theirs.get("key") == value
    theirs.set("text", "is bytes")
    assert ours.get("text") == b"is bytes"
    assert ours.check(["key", "text"])
    assert not ours.check(["key", "other"])
    assert not PrefixedStore("a", ours).check(["key"])
    PrefixedStore("a", ours).set("key", "3")
    assert theirs.get("a/key") == b"3"


def test_a_key_that_does_not_come_is_waited_for_until_the_deadline(server: StoreServer) -> None:
    with pytest.raises(PeerLost, match="no entry in the store within the deadline"):
        reached(server, timeout_seconds=0.05).get("key")
    ours, theirs = reached(server), reached(server)
    later = threading.Timer(0.05, lambda: theirs.set("key", "value"))
    later.start()
    assert ours.get("key") == b"value"
    later.join()


@pytest.mark.parametrize("token", ["", "another", TOKEN[:-1]])
def test_who_does_not_know_the_token_reads_and_writes_nothing(server: StoreServer, token: str) -> None:
    with pytest.raises(PeerLost, match="the store at 127"):
        reached(server, token, 0.5)


def test_a_server_that_does_not_know_the_token_is_told_nothing() -> None:
    with closing(StoreServer("127.0.0.1", "another")) as other, pytest.raises(PeerLost):
        reached(other, TOKEN, 0.5)


def test_waiting_is_broken_off_and_a_server_that_ends_is_a_lost_peer(server: StoreServer) -> None:
    abort = Abort()
    ours = reached(server, abort=abort)
    threading.Timer(0.05, lambda: abort.set("the view changes")).start()
    began = time.monotonic()
    with pytest.raises(PeerLost, match="the view changes"):
        ours.get("key")
    assert time.monotonic() - began < 5.0
    theirs = reached(server)
    server.close()
    with pytest.raises(PeerLost) as lost:
        theirs.set("key", "value")
    assert lost.value.ranks == (0,)


def test_strangers_take_neither_memory_nor_descriptors(server: StoreServer) -> None:
    """Whatever they send: they are hung up on, and members are served meanwhile."""
    ours = reached(server)
    before = len(os.listdir("/proc/self/fd"))
    for said in (b"", b"no JSON {", bytes(88), os.urandom(1 << 16), b"\x00" * (8 << 20)):
        strangers = []
        for _ in range(200):
            wire = socket.create_connection(("127.0.0.1", server.port))
            wire.setblocking(False)
            with suppress(OSError):
                wire.send(said)
            strangers.append(wire)
        ours.set("key", "value")
        assert reached(server).get("key") == b"value"
        for wire in strangers:
            wire.close()
    gc.collect()
    assert within(20.0, lambda: len(os.listdir("/proc/self/fd")) <= before + 2)


def test_a_connection_ends_with_the_store(server: StoreServer) -> None:
    ours = reached(server)
    ours.set("key", "value")
    before = len(os.listdir("/proc/self/fd"))
    del ours
    gc.collect()
    assert within(20.0, lambda: len(os.listdir("/proc/self/fd")) == before - 2)  # both ends are here


def connect_all(rank: int, size: int, kind: str, place: str) -> list[float]:
    """The sums over a communicator of all workers, and over torch's default group."""
    rendezvous = Rendezvous(
        rank, in_blocks(size, size), place, kind, torch.device("cpu"), 20.0, security=Security(TOKEN)
    )
    comm = rendezvous.connect(range(size))
    world = rendezvous.open_world()
    found = comm.sum(torch.ones(1)).wait().tolist()
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    comm.gather(torch.zeros(1)).wait()
    world.close()
    comm.close()
    return found + total.tolist()


@pytest.mark.parametrize("kind", ["gloo", "shared_memory"])
def test_workers_meet_there(kind: str) -> None:
    with closing(open_store("", "http://127.0.0.1:9", TOKEN)) as store:
        assert run(3, connect_all, kind, for_attempt(store.url, 7)) == [[3.0, 3.0]] * 3


def secure(rank: int, size: int, place: str, encrypted: bool) -> bool:
    """Whether what this worker says to an actor on another host is encrypted."""
    rendezvous = Rendezvous(
        rank, ["a", "b"], place, "gloo", torch.device("cpu"), 20.0, security=Security(TOKEN, encrypted)
    )
    ListeningSockets.open = staticmethod(lambda address: ListeningSockets([listen(address)], ""))  # type: ignore[method-assign]
    comm = rendezvous.connect(range(size))
    connections = comm.host(Echo(rank))
    found = {connection._outbox._outgoing._encrypted for connection in connections}  # type: ignore[attr-defined]
    comm.gather(torch.zeros(1)).wait()
    comm.close()
    return bool(found.pop())


@pytest.mark.parametrize("encrypted", [False, True])
def test_messages_to_other_hosts_are_encrypted_where_the_run_asks_for_it(encrypted: bool) -> None:
    with closing(open_store("", "http://127.0.0.1:9", TOKEN)) as store:
        assert run(2, secure, for_attempt(store.url, 1), encrypted) == [encrypted] * 2
