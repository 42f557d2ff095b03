"""The laws of communicators, over all of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comm import laws
from tests.support.communicators import connected
from tests.support.leftovers import within
from tests.support.processes import run, start
from unisono.comm import Communicator, SingleWorker, simulate
from unisono.errors import CommunicationError, MessageMismatch, PeerLost

DEADLINE_SECONDS = 20.0
REAL = [(kind, size) for kind in ("gloo", "shared_memory") for size in (2, 3, 4)]
EVERY = [("alone", 1), *(("simulated", size) for size in (1, 2, 3, 4)), *REAL]


def over(kind: str, size: int, directory: Path, law: Callable[..., Any], *args: Any) -> list[Any]:
    """What `law` returned on each worker of a communicator of that kind."""
    if kind == "alone":
        return [law(SingleWorker(), *args)]
    if kind == "simulated":
        return simulate(size, law, *args)
    return run(size, connected, kind, f"file://{directory}", DEADLINE_SECONDS, law, *args)


@pytest.mark.short(3)
@pytest.mark.parametrize(("kind", "size"), EVERY)
def test_common_laws(kind: str, size: int, tmp_path: Path) -> None:
    over(kind, size, tmp_path, all_common_laws)


def all_common_laws(comm: Communicator) -> None:
    for law in laws.COMMON:
        law(comm)


@pytest.mark.parametrize(("kind", "size"), [(k, n) for k, n in EVERY if k != "gloo"])
def test_sums_are_in_the_order_of_ranks(kind: str, size: int, tmp_path: Path) -> None:
    over(kind, size, tmp_path, laws.sums_are_in_the_order_of_ranks)


@pytest.mark.parametrize(
    ("kind", "size", "rounds"),
    [("simulated", 3, 200), ("gloo", 3, 150), ("shared_memory", 2, 1000), ("shared_memory", 4, 1000)],
)
def test_any_sequence_of_verbs_works(kind: str, size: int, rounds: int, tmp_path: Path) -> None:
    pause_seconds = 0.0 if kind == "simulated" else 0.003
    over(kind, size, tmp_path, laws.any_sequence_of_verbs_works, rounds, pause_seconds)


@pytest.mark.parametrize(("kind", "size"), [(k, n) for k, n in EVERY if n in (2, 3)])
def test_a_mismatch_names_both_sides_on_both_sides(kind: str, size: int, tmp_path: Path) -> None:
    workers = over(kind, size, tmp_path, laws.mismatches_name_both_sides)
    # Real workers all see it; on the simulated wire those two between whom it happened.
    for seen in workers[:2] if kind == "simulated" else workers:
        for case, (_, _, *said) in laws.MISMATCHES.items():
            assert all(part in seen[case] for part in ("worker 0", "worker 1", *said)), (case, seen[case])


def test_after_a_mismatch_nothing_hangs(tmp_path: Path) -> None:
    for kind in ("gloo", "shared_memory"):
        (tmp_path / kind).mkdir()
        for errors in over(kind, 2, tmp_path / kind, mismatch_and_go_on):
            assert [type(error) for error in errors] == [MessageMismatch] * 5


def mismatch_and_go_on(comm: Communicator) -> list[CommunicationError]:
    assert laws.mismatch(comm, "verb")
    return laws.everything_fails_from_now_on(comm)


# A peer that is lost. The victim is the last rank; what it does, it does to itself.


def survive(comm: Communicator, verb: str, blow: int, in_the_middle: bool, directory: Path) -> Any:
    """The error that a survivor saw at `verb`, after how many seconds, and those of all verbs after it."""
    large = comm.allocate(5_000_000, torch.float32)
    warm, good = laws.start_sum(comm, torch.float32, (3,))
    assert good(warm.wait())
    # What the victim has sent may be lost with it: it waits until nobody needs that any more.
    (directory / f"warm-{comm.rank}").touch()
    if comm.rank == comm.size - 1:
        assert within(DEADLINE_SECONDS, lambda: len(list(directory.glob("warm-*"))) == comm.size)

    def begin() -> Any:
        if verb == "allocated_sum":
            return comm.sum(large)
        return laws.STARTS[verb](comm, torch.float32, (2_000_000,) if in_the_middle else (4,))[0]

    if comm.rank == comm.size - 1:
        if in_the_middle:
            begin().poll()
        os.kill(os.getpid(), blow)
    began = time.monotonic()
    try:
        begin().wait()
    except PeerLost as error:
        seconds = time.monotonic() - began
        return error, seconds, laws.everything_fails_from_now_on(comm)
    return None, 0.0, []


@pytest.mark.short(9)
@pytest.mark.parametrize("in_the_middle", [False, True], ids=["before", "in the middle"])
@pytest.mark.parametrize("verb", laws.STARTS)
@pytest.mark.parametrize("kind", ["gloo", "shared_memory"])
def test_a_killed_peer_is_lost_at_every_verb(kind: str, verb: str, in_the_middle: bool, tmp_path: Path) -> None:
    size = 3
    args = (kind, f"file://{tmp_path}", DEADLINE_SECONDS, survive, verb, signal.SIGKILL, in_the_middle, tmp_path)
    with start(size, connected, *args) as workers:
        results = workers.results(lost={size - 1})
    for error, seconds, later in results[: size - 1]:
        if error is None:
            # A root may have sent, and a worker may have received, all that it needed: it sees the loss
            # later.
            assert in_the_middle
            continue
        assert seconds < DEADLINE_SECONDS / 4
        assert error.ranks == ((size - 1,) if kind == "shared_memory" else ())
        assert [type(each) for each in later] == [PeerLost] * 5


@pytest.mark.short(4)
@pytest.mark.parametrize("verb", laws.STARTS)
@pytest.mark.parametrize("kind", ["gloo", "shared_memory"])
def test_a_silent_peer_is_lost_at_every_verb_within_the_deadline(kind: str, verb: str, tmp_path: Path) -> None:
    size, timeout_seconds = 3, 1.0
    args = (kind, f"file://{tmp_path}", timeout_seconds, survive, verb, signal.SIGSTOP, False, tmp_path)
    with start(size, connected, *args) as workers:
        results = workers.results(lost={size - 1})
    for error, seconds, later in results[: size - 1]:
        assert error is not None
        assert seconds < timeout_seconds + 1.0
        if kind == "shared_memory":
            assert error.ranks == (size - 1,)
        assert [type(each) for each in later] == [PeerLost] * 5


def outlast_a_deadline(comm: Communicator, directory: Path) -> float:
    """Worker 1 starts only once worker 0 has polled in vain for many times the deadline."""
    channel = comm.channel("slow")
    channel._timeout_seconds = 0.01  # type: ignore[attr-defined]
    comm.wait_without_deadline()
    began = time.monotonic()
    if comm.rank == 1:
        assert within(DEADLINE_SECONDS, (directory / "late").exists)
    work = channel.sum(torch.ones(1))
    while comm.rank == 0 and time.monotonic() - began < 0.2:
        assert not work.poll()
    (directory / "late").touch()
    return work.wait().item()


@pytest.mark.parametrize("kind", ["gloo", "shared_memory"])
def test_a_slow_peer_is_waited_for_without_a_deadline(kind: str, tmp_path: Path) -> None:
    assert over(kind, 2, tmp_path, outlast_a_deadline, tmp_path) == [2.0, 2.0]
