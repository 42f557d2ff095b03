"""Runs cases in every way, and compares what comes of them with plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, distributed

from tests.end_to_end.loop_cases import CASES
from tests.end_to_end.loop_cases.environments import (
    MICRO_BATCHES,
    AssignedData,
    DataParallel,
    Environment,
    MicroBatches,
    OwnData,
)
from tests.end_to_end.loop_cases.table import Case, Expected, Numbers
from tests.support import processes
from tests.trainer.small_loops import world_of
from unisono import World
from unisono.comm import Communicator, connect, outcomes
from unisono.errors import CommunicationError, UnisonoError

FORMS = ("own", "steps")
CONNECT_SECONDS = 10.0
"""How long a worker of a process group waits for another one."""

CASE_SECONDS, SLOW_CASE_SECONDS = 30.0, 240.0


class Kind(Enum):
    """What came of a case."""

    EQUAL = "equal"
    REFUSED = "refused"
    LOST = "lost"
    DIFFERENT = "DIFFERENT"
    HANG = "HANG"
    CRASHED = "CRASHED"


_FITTING = {
    Expected.EQUAL: {Kind.EQUAL},
    Expected.REFUSED: {Kind.REFUSED},
    Expected.EITHER: {Kind.EQUAL, Kind.REFUSED},
    Expected.ENDS: {Kind.EQUAL, Kind.REFUSED, Kind.LOST},
}


@dataclass(frozen=True)
class Verdict:
    """What came of a case, and the sentence or number that says more."""

    kind: Kind
    words: str = ""

    def fits(self, expected: Expected, size: int) -> bool:
        """Whether this was expected. A single worker need not refuse what several cannot do."""
        alone = {Kind.EQUAL} if size == 1 and expected is Expected.REFUSED else set()
        return self.kind in _FITTING[expected] | alone

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.words}" if self.words else self.kind.value


# ---- ways to run a case


def in_plain_torch(case: Case, form: str, size: int) -> Numbers:
    """The numbers that are right for `size` workers."""
    return _plain(case.name, MICRO_BATCHES if form == "steps" else size)


@cache
def _plain(name: str, shares: int) -> Numbers:
    return _alone(name, Environment(shares))


def in_micro_batches(case: Case) -> Numbers:
    """What plain torch comes to with micro-batches one after the other."""
    return _alone(case.name, MicroBatches())


def without_exchange(case: Case, env: Environment) -> Numbers:
    """What a worker comes to that exchanges nothing."""
    return _alone(case.name, env)


def _alone(name: str, env: Environment) -> Numbers:
    with torch.random.fork_rng():
        return CASES[name].run(env)


def in_threads(case: Case, form: str, size: int) -> Verdict:
    """What comes of a case on virtual workers."""
    found = outcomes(size, lambda comm: _in_world(case, form, world_of(comm)))
    ends = [_failure(each) if isinstance(each, BaseException) else each for each in found]
    return _judge(in_plain_torch(case, form, size), ends, case.tolerance)


def in_processes(case: Case, way: str, size: int, directory: Path) -> Verdict:
    """What comes of a case in processes: with a world (`way` is a form) or under ``ddp``.

    `directory` is empty, and used for the rendezvous.
    """
    seconds = SLOW_CASE_SECONDS if case.slow else CASE_SECONDS
    with processes.start(size, _work, case.name, way, str(directory), timeout_seconds=seconds) as workers:
        ends = [_end(workers, rank, size) for rank in range(size)]
    return _judge(in_plain_torch(case, "own" if way == "ddp" else way, size), ends, case.tolerance)


def _end(workers: processes.Workers, rank: int, size: int) -> Numbers | Verdict:
    """What `rank` came to."""
    try:
        found: Numbers | Verdict = workers.results(lost=set(range(size)) - {rank})[rank]
    except processes.ChildFailed as failed:
        hangs = "still run after" in str(failed)
        return Verdict(Kind.HANG if hangs else Kind.CRASHED, str(failed).splitlines()[0])
    return found


def _work(rank: int, size: int, name: str, way: str, directory: str) -> Numbers | Verdict:
    torch.manual_seed(rank)
    try:
        if way == "ddp":
            return _under_ddp(CASES[name], rank, size, directory)
        return _in_world(CASES[name], way, world_of(_connected(rank, size, directory)))
    except Exception as error:
        return _failure(error)


def _connected(rank: int, size: int, directory: str) -> Communicator:
    return connect(
        rank, size, rendezvous=f"file://{directory}/rendezvous", local_size=size, timeout_seconds=CONNECT_SECONDS
    )


def _in_world(case: Case, form: str, world: World) -> Numbers:
    with world:
        return case.run(OwnData(world) if form == "own" else AssignedData(world))


def _under_ddp(case: Case, rank: int, size: int, directory: str) -> Numbers:
    distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/ddp", rank=rank, world_size=size,
        timeout=timedelta(seconds=CONNECT_SECONDS),
    )  # fmt: skip
    try:
        return case.run(DataParallel(rank, size, case.find_unused))
    finally:
        distributed.destroy_process_group()


# ---- comparison


def _failure(error: BaseException) -> Verdict:
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, CommunicationError):
        waits = any(sign in words for sign in ("deadlock", "deadline", "did not connect"))
        return Verdict(Kind.HANG if waits else Kind.LOST, words)
    if isinstance(error, UnisonoError):
        return Verdict(Kind.REFUSED, words)
    return Verdict(Kind.HANG if "imed out" in words or "imeout" in words else Kind.CRASHED, words)


def _judge(expected: Numbers, ends: Sequence[Numbers | Verdict], tolerance: float) -> Verdict:
    """The verdict on what all workers came to: the gravest failure, and else the largest difference."""
    failures = [each for each in ends if isinstance(each, Verdict)]
    for kind in (Kind.CRASHED, Kind.HANG, Kind.REFUSED, Kind.LOST):
        if chosen := [each for each in failures if each.kind is kind]:
            return chosen[0]
    far = [difference(expected, each) for each in ends if not isinstance(each, Verdict)]
    if missing := expected.keys() - ends[0].keys():  # type: ignore[union-attr]
        return Verdict(Kind.DIFFERENT, f"worker 0 lacks {', '.join(sorted(missing))}")
    name, worst = max(far, key=lambda each: each[1])
    return Verdict(Kind.EQUAL) if worst <= tolerance else Verdict(Kind.DIFFERENT, f"{name} by {worst:.1e}")


def difference(expected: Numbers, found: Numbers) -> tuple[str, float]:
    """The name in `found` whose numbers differ most, and how far; infinity where names or shapes are others."""
    if not found.keys() <= expected.keys():
        return ", ".join(sorted(found.keys() - expected.keys())), float("inf")
    each = {name: _distance(expected[name], value) for name, value in found.items()}
    return max(each.items(), key=lambda item: item[1])


def _distance(expected: Tensor, found: Tensor) -> float:
    if expected.shape != found.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    same = (expected == found) | (expected.isnan() & found.isnan())
    far = ((expected - found).abs() / (1 + expected.abs())).nan_to_num(nan=float("inf"))
    return float(torch.where(same, 0.0, far).max())
