"""Shared memory: no copies, no leaks, and a fallback where memory cannot be shared."""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from tests.comm.laws import STARTS, start_sum
from tests.support.leftovers import mappings, open_files, within
from tests.support.processes import run, start
from unisono.comm import SharedMemory, TorchGroup, connect
from unisono.comm.abort import Abort
from unisono.comm.connect import Rendezvous
from unisono.comm.shared_memory import rounds as shared_memory
from unisono.comm.shared_memory.memfd import open_of
from unisono.comm.shared_memory.memory_map import BufferSlice, SharedMemoryMap
from unisono.comm.shared_memory.peer_processes import PeerProcesses
from unisono.errors import PeerLost


def joined(rank: int, size: int, directory: str, timeout_seconds: float = 20.0) -> Any:
    return connect(rank, size, rendezvous=f"file://{directory}", local_size=size, timeout_seconds=timeout_seconds)


def no_copies(rank: int, size: int, directory: str) -> None:
    comm = joined(rank, size, directory)
    assert isinstance(comm, SharedMemory)
    x = comm.allocate(100_000, torch.float32)
    spans = [span for span in mappings() if span[0] <= x.data_ptr() < span[1]]
    assert len(spans) == 1
    before = x.fill_(rank).clone()
    result = comm.sum(x).wait()
    assert spans[0][0] <= result.data_ptr() < spans[0][1]
    assert torch.equal(x, before), "what was added up was read where it lies"
    second = comm.sum(x).wait()
    assert second.data_ptr() == result.data_ptr()
    comm.close()


def test_an_allocated_sum_is_read_and_written_in_shared_memory(tmp_path: Path) -> None:
    run(3, no_copies, str(tmp_path))


def leave_nothing(rank: int, size: int, directory: str) -> None:
    # The first time, libraries open what they keep.
    use_and_close(rank, size, f"{directory}/first")
    before = open_files()
    for attempt in range(3):
        use_and_close(rank, size, f"{directory}/{attempt}")
    assert open_files() == before
    assert mappings() == []


def use_and_close(rank: int, size: int, directory: str) -> None:
    comm = joined(rank, size, directory)
    channel = comm.channel("a")
    for each in (comm, channel):
        for verb in STARTS:
            work, good = STARTS[verb](each, torch.float32, (50,))
            assert good(work.wait())
    comm.close()
    with pytest.raises(PeerLost, match="this end was closed"):
        comm.sum(torch.zeros(1)).wait()


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    run(2, leave_nothing, str(tmp_path))


def shared_kilobytes() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:"))


def hold_memory(rank: int, size: int, directory: str) -> None:
    comm = joined(rank, size, directory)
    comm.allocate(100_000_000, torch.float32)
    Path(directory, f"ready{rank}").touch()
    signal.pause()


@pytest.mark.alone
def test_nothing_is_left_when_all_are_killed(tmp_path: Path) -> None:
    before, size, taken = shared_kilobytes(), 2, 3 * 400_000
    with start(size, hold_memory, str(tmp_path)) as workers:
        end = time.monotonic() + 60
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(size)):
            assert time.monotonic() < end
            assert all(process.is_alive() for process in workers.processes)
            time.sleep(0.01)
        assert shared_kilobytes() - before > 0.8 * taken
    # The kernel gives pages back a moment after the last process is reaped.
    end = time.monotonic() + 10
    while shared_kilobytes() - before > 0.2 * taken:
        assert time.monotonic() < end, "memory is still taken"
        time.sleep(0.01)


def with_little_memory(rank: int, size: int, directory: str, limit_bytes: int) -> list[str]:
    """The log lines of a run whose memory files may not be longer than `limit_bytes`."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unisono").addHandler(handler)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    comm = joined(rank, size, directory)
    assert isinstance(comm, TorchGroup if limit_bytes < SharedMemoryMap(size).nbytes else SharedMemory)
    x = comm.allocate(20_000_000, torch.float32)
    assert not x.any()
    work, good = start_sum(comm, torch.float32, (1000,))
    assert good(work.wait())
    assert (comm.sum(x.fill_(rank + 1)).wait() == 3).all()
    comm.close()
    return lines


def test_without_memory_all_fall_back_to_gloo_and_one_logs_it(tmp_path: Path) -> None:
    first_lines, other_lines = run(2, with_little_memory, str(tmp_path), 100_000)
    assert other_lines == []
    assert first_lines == ["shared memory cannot be used (worker 0: [Errno 27] File too large): using gloo instead"]


def test_without_memory_for_one_tensor_its_sums_are_copied(tmp_path: Path) -> None:
    first_lines, other_lines = run(2, with_little_memory, str(tmp_path), 20_000_000)
    assert other_lines == []
    reason = "worker 0: File too large"
    assert first_lines == [f"no shared memory for a tensor of 80000000 bytes ({reason}): its sums are copied"]


def counted(rank: int, size: int, directory: str) -> dict[str, int]:
    comm = joined(rank, size, directory)
    x, seen, before = comm.allocate(3 * 1600, torch.float32), {}, 0
    for verb, call in {
        "allocated": lambda: comm.sum(x),
        "sum": lambda: comm.sum(torch.zeros(10)),
        "gather": lambda: comm.gather(torch.zeros(10)),
        "broadcast": lambda: comm.broadcast(torch.zeros(10), root=1),
        "exchange": lambda: comm.exchange([torch.zeros(10)] * 3, [torch.zeros(10)] * 3),
        "swap": lambda: comm.swap(*[{1 - rank: torch.zeros(10)} if rank < 2 else {}] * 2),
    }.items():
        call().wait()
        seen[verb], before = comm.bytes_sent - before, comm.bytes_sent
    comm.close()
    return seen


def test_bytes_sent_are_those_that_peers_read(tmp_path: Path) -> None:
    for rank, seen in enumerate(run(3, counted, str(tmp_path))):
        assert seen == {
            # Two thirds of the buffer are read by peers, and two peers read the third that was added up here.
            "allocated": 2 * 3200 * 4,
            "sum": 80,
            "gather": 80,
            "broadcast": 80 if rank == 1 else 0,
            "exchange": 80,
            "swap": 40 if rank < 2 else 0,
        }


def leave_early(rank: int, size: int, directory: str) -> tuple[int, ...]:
    """Worker 1 goes away in peace; worker 0 gets what was owed to it, then learns who is missing."""
    comm = joined(rank, size, directory)
    work, good = start_sum(comm, torch.float32, (5,))
    assert good(work.wait())
    if rank == 1:
        comm.close()
        return ()
    with pytest.raises(PeerLost) as caught:
        comm.gather(torch.zeros(1)).wait()
    return caught.value.ranks


def test_a_peer_that_closed_is_named(tmp_path: Path) -> None:
    assert run(2, leave_early, str(tmp_path)) == [(1,), ()]


def outlive_the_first(rank: int, size: int, directory: str) -> str:
    """Worker 0 is killed after it has posted the file of a channel and that it has mapped it itself, when the other is
    about to open it."""
    comm = joined(rank, size, directory)
    if rank == 0:
        comm.channel("next")  # it is waited for
        threading.Event().wait()
    peers, opened = comm._resources.peers, shared_memory.open_of

    def too_late(pid: int, number: int, nbytes: int) -> torch.Tensor:
        assert within(20.0, lambda: comm._words[comm._posted[0]] > comm._round)
        os.kill(pid, signal.SIGKILL)
        assert within(20.0, lambda: 0 in peers.lost())
        return opened(pid, number, nbytes)

    shared_memory.open_of = too_late
    with pytest.raises(PeerLost) as lost:
        comm.channel("next")
    comm.close()
    return str(lost.value)


def test_memory_whose_owner_is_gone_is_that_of_a_lost_peer(tmp_path: Path) -> None:
    with start(2, outlive_the_first, str(tmp_path)) as workers:
        _, words = workers.results(lost={0})
    assert "worker 0" in words


def one_notices(rank: int, size: int, directory: str) -> float:
    """Worker 2 is silent; worker 0's deadline is short, worker 1's is long, yet it does not wait for its
    own."""
    comm = joined(rank, size, directory, timeout_seconds=1.0 if rank == 0 else 50.0)
    comm.gather(torch.zeros(1)).wait()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        comm.sum(torch.zeros(1)).wait()
    assert caught.value.ranks == (2,)
    return time.monotonic() - began


def test_a_worker_that_notices_a_loss_notifies_the_others(tmp_path: Path) -> None:
    with start(3, one_notices, str(tmp_path)) as workers:
        assert max(workers.results(lost={2})[:2]) < 5.0


def open_late(rank: int, size: int, directory: str) -> None:
    """Worker 0 breaks off, and closes the file, before worker 1 has opened it."""
    abort, opens, closed = Abort(), Path(directory, "opens"), Path(directory, "closed")
    hosts, device = ["here"] * size, torch.device("cpu")
    comm = Rendezvous(rank, hosts, f"file://{directory}/meeting", "auto", device, 20.0, abort=abort).connect(
        range(size)
    )

    def late(pid: int, number: int, nbytes: int) -> torch.Tensor:
        opens.touch()
        assert within(20, closed.exists)
        return open_of(pid, number, nbytes)

    def break_off() -> None:
        assert within(20, opens.exists)
        abort.set("the view is over")

    if rank == 0:
        Thread(target=break_off).start()
    else:
        shared_memory.open_of = late
    with pytest.raises(PeerLost):
        comm.channel("late")
    closed.touch()


def test_memory_that_worker_0_has_closed_is_not_missing_it_is_worker_0_that_is_lost(tmp_path: Path) -> None:
    run(2, open_late, str(tmp_path))


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 1000])
def test_slices_cover_everything_once_and_share_no_cache_line(size: int, numel: int) -> None:
    buffers = [torch.full((numel,), 2.0**rank) for rank in range(size)]
    result = torch.zeros(numel)
    parts = [BufferSlice(buffers, result, rank, 0) for rank in range(size)]
    for part in parts:
        before = result.clone()
        part.add_up(None)
        changed = (result != before).nonzero().flatten()
        assert not len(changed) or changed[0] % 16 == 0
    assert (result == 2.0**size - 1).all()
    assert sum(part.bytes_read(None) for part in parts) == 2 * (size - 1) * numel * 4


def sleep(rank: int, size: int) -> None:
    signal.pause()


@pytest.mark.parametrize("descriptors", [True, False], ids=["pidfd", "proc"])
def test_exited_processes_are_lost_zombies_included(descriptors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not descriptors:
        monkeypatch.delattr(os, "pidfd_open")
    child = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    with start(1, sleep) as workers:
        peers = PeerProcesses({3: child, 5: workers.processes[0].pid})
        assert peers.lost() == frozenset()
        os.kill(child, signal.SIGKILL)
        end = time.monotonic() + 10
        while not peers.lost():
            assert time.monotonic() < end
        assert peers.lost() == {3}
        os.waitpid(child, 0)
        assert peers.lost() == {3}
        peers.close()


def test_several_threads_may_ask_which_processes_have_exited() -> None:
    """As channels do that different threads use."""
    children = [os.posix_spawn("/bin/sleep", ["sleep", "60"], {}) for _ in range(3)]
    peers = PeerProcesses(dict(enumerate(children)))
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(lambda: [peers.lost() for _ in range(3000)][-1]) for _ in range(4)]
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for each in asking:
            each.result()
    assert peers.lost() == {0, 1, 2}
    peers.close()


def look_too_early(rank: int, size: int, directory: str) -> list[int]:
    """Worker 0 looks for the first of two rounds just before its peer posts both, and for the second just after."""
    comm = joined(rank, size, directory)
    if rank == 0:
        honest, looks = comm._reached, Counter[int]()

        def early(places: tuple[int, ...], attempt: int) -> bool:
            if places is comm._posted and attempt == first:
                while comm._words[comm._posted[1]] < first + 1:
                    time.sleep(0)
                looks[attempt] += 1
                return looks[attempt] > 2  # what the first two looks saw is what was there before
            return honest(places, attempt)

        first = comm._round + 1
        comm._reached = early
    order = []
    finish = comm._finish
    comm._finish = lambda attempt: (order.append(attempt), finish(attempt))
    works = [comm.gather(torch.tensor([rank, i])) for i in range(2)]
    assert [work.wait().tolist() for work in works] == [[[0, i], [1, i]] for i in range(2)]
    return order


def test_rounds_are_done_in_their_order(tmp_path: Path) -> None:
    for order in run(2, look_too_early, str(tmp_path)):
        assert order == sorted(order)
