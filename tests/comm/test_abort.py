"""What waits for peers can be broken off from another thread, however it waits; and nothing of it stays."""

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
from tests.launch.observation import within
from tests.processes import start
from unisono.comm import Abort, Meeting
from unisono.errors import PeerLost

WHY = "the view is over"
PROMPT_SECONDS = 2.0  # of a machine that has other things to do; far below every deadline here
DEADLINE_SECONDS = 60.0


def test_the_first_reason_stays_and_everybody_is_woken_once() -> None:
    abort, woken = Abort(), []
    abort.check("sum")
    abort.then(lambda: woken.append("kept"))
    abort.then(lambda: woken.append("taken back"))()
    abort.set(WHY)
    abort.set("another")
    abort.then(lambda: woken.append("too late"))
    assert woken == ["kept", "too late"]
    assert abort.why == WHY
    with pytest.raises(PeerLost, match=f"a worker lost during sum: {WHY}"):
        abort.check("sum")
    with pytest.raises(ValueError, match="say why"):
        Abort().set("")


def test_what_listens_to_nobody_is_left_alone() -> None:
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


# Real workers. Those that wait are told to break off once the last of them has done what it does.

HOSTS = {"shared_memory": "aaa", "gloo": "aaa", "tiers": "aabb"}


def meet(rank: int, size: int, kind: str, directory: Path, abort: Abort) -> Any:
    hosts = list(HOSTS[kind])
    way = "auto" if kind == "tiers" else kind
    meeting = Meeting(rank, hosts, f"file://{directory}/place", way, torch.device("cpu"), DEADLINE_SECONDS, abort=abort)
    return meeting.among(range(size))


def break_off(abort: Abort, directory: Path, told: list[float]) -> None:
    """Wait until the last worker has said that it is about to be lost, and then for the others to be waiting."""
    assert within(DEADLINE_SECONDS, lambda: (directory / "lost").exists())
    time.sleep(0.3)
    told.append(time.monotonic())
    abort.set(WHY)


def wait_for_the_lost(
    rank: int, size: int, kind: str, verb: str, directory: Path
) -> tuple[str, float, float, list[str]]:
    """What was raised, how long after it was broken off, how long it took to close, and what all verbs say then."""
    abort, told = Abort(), list[float]()
    comm = meet(rank, size, kind, directory, abort)
    comm.gather(torch.zeros(1)).wait()
    if rank == size - 1:
        (directory / "lost").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Thread(target=break_off, args=(abort, directory, told), daemon=True).start()
    begin = laws.STARTS.get(verb) or (lambda each, *given: (each.tiers("t").within.sum(torch.zeros(3)), None))
    lane = lambda: comm.lane("another")
    try:
        if verb == "lane":
            lane()
        else:
            begin(comm, torch.float32, (50_000,))[0].wait()
            comm.gather(torch.zeros(1)).wait()
    except PeerLost as error:
        seconds = time.monotonic() - told[0] if told else 0.0  # one that was told earlier has told this one
        later = [type(each).__name__ for each in laws.everything_fails_from_now_on(comm)]
        closing = time.monotonic()
        comm.close()
        return str(error), seconds, time.monotonic() - closing, later
    return "", 0.0, 0.0, []


@pytest.mark.parametrize(
    ("kind", "verb"),
    [(kind, verb) for kind in ("gloo", "shared_memory") for verb in (*laws.STARTS, "lane")] + [("tiers", "within")],
)
def test_who_waits_for_a_stopped_peer_is_told(kind: str, verb: str, tmp_path: Path) -> None:
    size = len(HOSTS[kind])
    with start(size, wait_for_the_lost, kind, verb, tmp_path) as workers:
        results = workers.results(lost={size - 1})
    for error, seconds, closing, later in results[: size - 1]:
        assert WHY in error or "another worker found it lost" in error or "Connection closed" in error, error
        assert seconds < PROMPT_SECONDS
        assert closing < PROMPT_SECONDS
        assert later == ["PeerLost"] * 5
    print(kind, verb, [(round(s, 3), round(c, 3)) for _, s, c, _ in results[: size - 1]])
