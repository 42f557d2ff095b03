"""Meeting where strangers read and write: over a store that anybody reaches, and with a token that they do not know."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from tests.processes import run
from unisono.comm import Abort, Meeting, in_blocks
from unisono.comm.sealed import Sealed
from unisono.errors import PeerLost

TOKEN = "a token that the run's workers know"


def served() -> c10d.Store:
    return c10d.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)


def test_what_is_written_is_read_by_who_knows_the_token_and_by_nobody_else() -> None:
    store = served()
    ours, theirs, later = (Sealed(store, token, about, 0.05, Abort()) for token, about in
                           ((TOKEN, "1"), ("another", "1"), (TOKEN, "2")))  # fmt: skip
    value = b"10.0.0.1:4000" * 10
    ours.set("key", value)
    assert ours.get("key") == value
    assert c10d.PrefixStore("a", ours).check(["key"]) is False
    assert value[:8] not in store.get("key")
    for other in (theirs, later):
        assert not other.check(["key"])
        with pytest.raises(PeerLost, match="did not come within the deadline"):
            other.get("key")


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 1000])
def test_values_of_any_length_return_and_are_hidden_anew_each_time(length: int) -> None:
    store = served()
    sealed, value = Sealed(store, TOKEN, "1", 0.05, Abort()), bytes(range(256)) * 4
    written = []
    for _ in range(2):
        sealed.set("key", value[:length])
        assert sealed.get("key") == value[:length]
        written.append(store.get("key"))
    assert written[0] != written[1]


def test_a_value_that_does_not_verify_does_not_exist() -> None:
    store = served()
    sealed = Sealed(store, TOKEN, "1", 0.05, Abort())
    sealed.set("key", b"value")
    written = store.get("key")
    for wrong in (b"", b"no JSON {", written[:-1], written + b"x", bytes(100), b"x" * (2 << 20)):
        store.set("key", wrong)  # type: ignore[arg-type]
        assert not sealed.check(["key"])
    for place in range(len(written)):
        flipped = bytearray(written)
        flipped[place] ^= 1
        store.set("key", bytes(flipped))  # type: ignore[arg-type]
        assert not sealed.check(["key"])
    store.set("other", written)  # type: ignore[arg-type]
    assert not sealed.check(["other"]), "a value belongs to its key"
    store.set("key", written)  # type: ignore[arg-type]
    assert sealed.get("key") == b"value"


def meet(rank: int, size: int, kind: str, place: str, directory: str) -> list[float]:
    """The sums of a first wire, of one between all in torch's world, and what a stranger reads meanwhile."""
    meeting = Meeting(rank, in_blocks(size, size), place, kind, torch.device("cpu"), 20.0, token=TOKEN)
    comm = meeting.among(range(size))
    world = meeting.open_world()
    found = comm.sum(torch.ones(1)).wait().tolist()
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    comm.gather(torch.zeros(1)).wait()
    world.close()
    comm.close()
    return found + total.tolist()


@pytest.mark.parametrize("kind", ["gloo", "shared_memory"])
def test_workers_meet_there(kind: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    place = f"tcp://127.0.0.1:{port}?attempt=7"
    assert run(3, meet, kind, place, str(tmp_path)) == [[3.0, 3.0]] * 3


def meddle(rank: int, size: int, place: str, port: int) -> list[float]:
    """Worker 2 is a stranger, who writes under all names that the others look for before they come."""
    if rank == 2:
        store = c10d.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)
        for key in ("here/0", "here/1", "listening/0", "listening/1"):
            store.set(f"attempt/7/meeting/1/-0-1/gloo/{key}", "no JSON {")
        store.set("meddled", "yes")
        store.wait(["over"])
        return []
    if rank == 0:
        served = c10d.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=20), wait_for_workers=False)
        served.wait(["meddled"])
    else:
        c10d.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False).wait(["meddled"])
    meeting = Meeting(rank, in_blocks(2, 2), place, "gloo", torch.device("cpu"), 20.0, token=TOKEN)
    comm = meeting.among(range(2))
    found = comm.sum(torch.ones(1)).wait().tolist()
    comm.gather(torch.zeros(1)).wait()
    if rank == 0:
        served.set("over", "yes")
        assert served.get("over")
    comm.close()
    return list(found)


def test_what_a_stranger_has_written_there_holds_nobody_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    place = f"tcp://127.0.0.1:{port}?served=1&attempt=7"
    assert run(3, meddle, place, port)[:2] == [[2.0], [2.0]]
