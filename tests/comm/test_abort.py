"""Operations that wait for peers can be aborted from another thread, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comm import laws
from tests.support.actors import Echo
from tests.support.processes import start
from unisono.comm import Abort, ActorMessage, Rendezvous
from unisono.errors import PeerLost

WHY = "the view is over"
PROMPT_SECONDS = 2.0  # of a machine that has other things to do; far below every deadline here
DEADLINE_SECONDS = 60.0


def test_the_first_reason_stays_and_every_callback_is_called_once() -> None:
    abort, woken = Abort(), []
    abort.check("sum")
    abort.add_callback(lambda: woken.append("kept"))
    abort.add_callback(lambda: woken.append("taken back"))()
    abort.set(WHY)
    abort.set("another")
    abort.add_callback(lambda: woken.append("too late"))
    assert woken == ["kept", "too late"]
    assert abort.reason == WHY
    with pytest.raises(PeerLost, match=f"a worker lost during sum: {WHY}"):
        abort.check("sum")
    with pytest.raises(ValueError, match="give the reason"):
        Abort().set("")


def test_a_call_that_cannot_be_aborted_is_abandoned() -> None:
    abort, free, ended = Abort(), threading.Event(), threading.Event()

    def stubborn() -> None:
        free.wait()
        ended.set()

    threading.Timer(0.05, lambda: abort.set(WHY)).start()
    with pytest.raises(PeerLost, match=WHY):
        abort.run("connect", stubborn)
    assert not ended.is_set()
    free.set()
    assert ended.wait(10)
    with pytest.raises(PeerLost, match=WHY):
        abort.run("connect", lambda: 1)


def test_what_is_run_has_its_result_its_error_and_its_deadline() -> None:
    abort, free = Abort(), threading.Event()
    assert abort.run("connect", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        abort.run("connect", lambda: 1 / 0)
    with pytest.raises(PeerLost, match="no answer within the deadline"):
        abort.run("connect", free.wait, 0.01)
    free.set()


# Real workers.

HOSTS = {"shared_memory": "aaa", "gloo": "aaa", "tiers": "aabb"}
VERBS = dict.fromkeys(("shared_memory", "gloo"), (*laws.STARTS, "channel", "host", "call")) | {"tiers": ("within",)}


def meet(rank: int, size: int, kind: str, place: str, abort: Abort) -> Any:
    way = "auto" if kind == "tiers" else kind
    hosts, device = HOSTS[kind], torch.device("cpu")
    return Rendezvous(rank, hosts, f"file://{place}", way, device, DEADLINE_SECONDS, abort=abort).connect(range(size))


def wait(comm: Any, connections: list[Any], verb: str) -> None:
    """For the last worker, who is not there any more."""
    if verb == "channel":
        comm.channel("another")
    elif verb == "host":
        comm.host(Echo(comm.rank))
    elif verb == "call":
        connections[-1].call(ActorMessage("echo")).wait()
    elif verb == "within":
        comm.hierarchy("t").intra_node.sum(torch.zeros(3)).wait()
    else:
        laws.STARTS[verb](comm, torch.float32, (50_000,))[0].wait()
        comm.gather(torch.zeros(1)).wait()  # what one has sent and another has received may be all that they need


def wait_for_the_lost(rank: int, size: int, kind: str, place: str) -> dict[str, Any]:
    """By verb, each with a communicator of its own: what was raised, how long after it was broken off, how long it took
    to close, and what all verbs say then."""
    aborts = {verb: Abort() for verb in VERBS[kind]}
    comms = {verb: meet(rank, size, kind, f"{place}/{verb}", abort) for verb, abort in aborts.items()}
    connections = comms["call"].host(Echo(rank)) if "call" in comms else []
    for comm in comms.values():
        comm.gather(torch.zeros(1)).wait()
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return {verb: aborted(comm, connections, verb, aborts[verb]) for verb, comm in comms.items()}


def aborted(comm: Any, connections: list[Any], verb: str, abort: Abort) -> Any:
    told = list[float]()

    def break_off() -> None:
        told.append(time.monotonic())
        abort.set(WHY)

    timer = threading.Timer(0.1, break_off)  # when this worker waits, as it does until then
    timer.start()
    with pytest.raises(PeerLost) as caught:
        wait(comm, connections, verb)
    ended = time.monotonic()
    timer.join()
    seconds = ended - told[0]  # below 0 where another, who was told before, has told this one
    later = [type(each).__name__ for each in laws.everything_fails_from_now_on(comm)]
    closing = time.monotonic()
    comm.close()
    return str(caught.value), seconds, time.monotonic() - closing, later


@pytest.mark.parametrize("kind", VERBS)
def test_waiting_for_a_stopped_peer_is_aborted(kind: str, tmp_path: Path) -> None:
    size = len(HOSTS[kind])
    with start(size, wait_for_the_lost, kind, str(tmp_path)) as workers:
        results = workers.results(lost={size - 1})[: size - 1]
    for verb in VERBS[kind]:
        assert any(WHY in worker[verb][0] for worker in results), "the others may have heard of it from this one"
        for _, seconds, closing, later in (worker[verb] for worker in results):
            assert seconds < PROMPT_SECONDS
            assert closing < PROMPT_SECONDS
            assert later == ["PeerLost"] * 5
