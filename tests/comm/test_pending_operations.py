"""What a communicator waits for, as another thread sees it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from tests.support import processes
from unisono.comm import Communicator, TorchGroup, connect, operation_queue
from unisono.comm.connect import share_memory
from unisono.comm.operation_queue import Blocked
from unisono.comm.shared_memory import rounds as shared_memory
from unisono.comm.torch_groups import process_group as torch_group
from unisono.errors import PeerLost

TEN_MINUTES = 600.0


@pytest.mark.parametrize(("kind", "missing"), [("shared_memory", (1,)), ("gloo", ())])
def test_another_thread_sees_which_message_of_which_lane_is_waited_for_and_of_whom(kind, missing, tmp_path) -> None:
    os.mkfifo(tmp_path / "seen")
    seen, _ = processes.run(2, _wait, kind, tmp_path)
    assert seen == [("", ()), ("gather (second, message 1)", missing), ("", ())]


def _wait(rank: int, size: int, kind: str, path: Path) -> list[tuple[str, tuple[int, ...]]]:
    comm = connect(rank, size, rendezvous=f"file://{path}/store", local_size=size, kind=kind)
    channel = comm.channel("second")
    channel.sum(torch.ones(3)).wait()
    seen = [comm.waits_for]

    def look() -> None:
        while not (found := comm.waits_for)[0]:
            time.sleep(0.001)
        seen.append(found)
        (path / "seen").write_text("it is")

    if rank == 0:
        looking = threading.Thread(target=look)
        looking.start()
    else:
        (path / "seen").read_text()  # waits until it is
    channel.gather(torch.ones(3)).wait()
    if rank == 0:
        looking.join()
    seen.append(comm.waits_for)
    comm.close()
    return seen


class Clock:
    """Time that passes only while somebody sleeps, `speed` times as fast as it is slept."""

    def __init__(self, speed: float) -> None:
        self.now, self.speed, self.sleeps = 1000.0, speed, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds * self.speed
        self.sleeps += 1


class Never:
    """What an operation waits for in vain: torch's handle of it, and the empty list of peers that are behind."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: Any) -> None:
        self._clock.sleep(timeout.total_seconds())

    def __iter__(self) -> Iterator[Any]:
        return iter(((), 0))


def group_of_one(kind: str) -> Communicator:
    if kind == "gloo":
        return TorchGroup(c10d.HashStore(), 0, 1, timeout_seconds=TEN_MINUTES)
    return share_memory(c10d.HashStore(), 0, 1, TEN_MINUTES)


@pytest.fixture(params=["gloo", "shared_memory"])
def comm(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    made = group_of_one(request.param)
    yield made
    made.close()


def wait_in_vain(comm: Communicator, siblings: int, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An operation of a channel that never ends, by `clock`; `siblings` other channels wait as well."""

    def steps() -> Iterator[Blocked]:
        while True:
            yield Blocked(False, Never(clock))

    channels: list[Any] = [comm.channel(str(number)) for number in range(1 + siblings)]
    for module in (operation_queue, torch_group, shared_memory):
        monkeypatch.setattr(module, "time", clock)
    first, *_ = [channel._enqueue("sum", steps()) for channel in channels]
    return first


@pytest.mark.parametrize("siblings", [0, 1])
def test_any_operation_may_be_waited_for_for_ten_minutes(comm, siblings, monkeypatch) -> None:
    clock = Clock(speed=80.0)
    with monkeypatch.context() as patched:
        operation = wait_in_vain(comm, siblings, clock, patched)
        with pytest.raises(PeerLost, match="600 s"):
            operation.wait()
    assert clock.now > 1000 + TEN_MINUTES
    assert clock.sleeps > 100, "it slept often, and not once for all the time"


@pytest.mark.parametrize("siblings", [0, 1])
def test_the_pause_after_any_number_of_attempts_is_short(comm, siblings, monkeypatch) -> None:
    clock = Clock(speed=1.0)
    with monkeypatch.context() as patched:
        operation = wait_in_vain(comm, siblings, clock, patched)
        for attempt in (0, 1, 7_000, 8_000, 1_200_000, 10**12):
            before = clock.now
            operation._queue._pause(attempt, operation)
            assert clock.now - before <= 0.05, attempt
