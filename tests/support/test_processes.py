"""The runner of worker processes distinguishes results, failures and killed workers."""

import os
import signal

import pytest
import torch

from tests.support.processes import ChildFailed, run, start
from unisono.errors import PeerLost


def square(rank: int, size: int, offset: int) -> torch.Tensor:
    return torch.tensor([rank * rank + offset, size])


def fail(rank: int, size: int) -> None:
    if rank == 1:
        raise ValueError("one is wrong")


def sleep(rank: int, size: int) -> None:
    signal.pause()


def die(rank: int, size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def fail_after_its_consequence(rank: int, size: int, fifo: str) -> None:
    """Rank 0 fails only when rank 1, which lost rank 0, has reported that and ended."""
    if rank == 1:
        os.open(fifo, os.O_WRONLY)
        raise PeerLost([0], "sum", "it is gone")
    with open(fifo) as other:
        other.read()
    raise ValueError("zero is wrong")


def test_results_come_by_rank() -> None:
    assert [x.tolist() for x in run(3, square, 7)] == [[7, 3], [8, 3], [11, 3]]


def test_a_child_s_traceback_is_raised() -> None:
    with pytest.raises(ChildFailed, match=r"rank 1 failed:(.|\n)*ValueError: one is wrong"):
        run(2, fail)


def test_a_cause_is_named_though_its_consequence_is_reported_first(tmp_path) -> None:
    os.mkfifo(fifo := tmp_path / "ended")
    with pytest.raises(ChildFailed, match=r"rank 0 failed: ValueError\('zero is wrong'\)"):
        run(2, fail_after_its_consequence, str(fifo))


def test_a_killed_child_is_named_unless_expected() -> None:
    with pytest.raises(ChildFailed, match="rank 1 failed: killed by SIGKILL"):
        run(2, die)
    with start(2, die) as workers:
        assert workers.results(lost={1}) == [0, None]


def test_a_child_that_hangs_is_ended() -> None:
    with pytest.raises(ChildFailed, match="still run"), start(1, sleep, timeout_seconds=0.3) as workers:
        workers.results()
    assert workers.processes[0].exitcode == -signal.SIGKILL
