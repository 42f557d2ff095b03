"""What a worker is doing, as another thread sees it."""

from __future__ import annotations

import collections
import itertools
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from unisono.observe import NullTracker, ThreadTracker
from unisono.observe.activity import Activity, Phase
from unisono.observe.user_frames import LOADER, raised_at, user_line

HERE = "tests/observe/test_activity_tracker.py"


def line(of: str) -> int:
    """The number of the one line of this file that ends so."""
    (found,) = [i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith(of)]
    return found


def test_a_thread_that_waits_inside_a_library_is_on_a_line_of_user_code(monkeypatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    go, started = threading.Event(), threading.Event()

    def waiting() -> None:
        started.set()
        go.wait()  # the line where it waits

    thread = threading.Thread(target=waiting)
    thread.start()
    started.wait()
    try:
        while (found := user_line(thread.ident or 0)) != f"{HERE}:{line('# the line where it waits')} waiting":
            assert found.startswith(HERE), found
    finally:
        go.set()
        thread.join()


def test_a_worker_that_waits_for_data_is_on_the_line_of_the_loader_thread() -> None:
    go, started = threading.Event(), threading.Event()

    def fetch() -> None:
        started.set()
        go.wait()

    thread = threading.Thread(target=fetch, name=f"{LOADER}_0")
    thread.start()
    started.wait()
    try:
        clock = itertools.count(step=1.0)
        watch = ThreadTracker(lambda: next(clock))
        assert watch.activity().line.endswith(" test_a_worker_that_waits_for_data_is_on_the_line_of_the_loader_thread")
        with watch(Phase.DATA):
            assert watch.activity().line.endswith(" fetch")
    finally:
        go.set()
        thread.join()


def test_a_thread_that_has_ended_is_on_no_line() -> None:
    thread = threading.Thread(target=collections.Counter)
    thread.start()
    thread.join()
    assert user_line(thread.ident or 0) == ""


def test_an_error_has_the_line_of_user_code_that_raised_it() -> None:
    with pytest.raises(ValueError, match="maxlen") as raised:
        collections.deque(maxlen=-1)  # the line that raises
    assert raised_at(raised.tb).partition(":")[2].startswith(f"{line('# the line that raises')} ")
    assert raised_at(None) == ""


class FakeCommunicator:
    waits_for = "sum (gradients, message 7)", (1, 2)


def test_the_activity_is_what_was_recorded() -> None:
    seconds = [0.0]
    watch = ThreadTracker(lambda: seconds[0])
    watch.set_phase(Phase.COMPUTE, FakeCommunicator())
    watch.commit(4)
    watch.set_position(4, 2)
    seconds[0] = 3.0
    seen = watch.activity()
    assert (seen.phase, seen.step, seen.micro_batch, seen.since_seconds) == (Phase.COMPUTE, 4, 2, 3.0)
    assert seen.is_waiting
    assert seen.description == "waiting for sum (gradients, message 7)"
    assert seen.missing == (1, 2)
    watch.set_phase(Phase.IDLE)
    assert not watch.activity().is_waiting


def test_a_null_tracker_passes_items_on() -> None:
    tracker = NullTracker()
    with tracker(Phase.DATA), tracker(Phase.COMPUTE):
        assert list(tracker.each(Phase.DATA, range(3))) == [0, 1, 2]


def test_every_phase_has_a_description() -> None:
    assert all(Activity(phase).description for phase in Phase)


_DUMPS_WHILE_TENSORS_ARE_COLLECTED = """
import gc, threading, time
import torch
from unisono.observe.user_frames import user_line

def drop():
    while not over.is_set():
        weight = torch.zeros(3, requires_grad=True)
        weight.itself = weight

def start():
    while not over.is_set():
        threading.Thread(target=int).start()

over = threading.Event()
gc.set_threshold(5)
threads = [threading.Thread(target=each) for each in (drop, drop, start)]
for thread in threads:
    thread.start()
end = time.monotonic() + 1
while time.monotonic() < end:
    user_line(0)
over.set()
for thread in threads:
    thread.join()
"""


def test_threads_continue_while_stacks_are_dumped_and_tensors_are_collected() -> None:
    subprocess.run([sys.executable, "-c", _DUMPS_WHILE_TENSORS_ARE_COLLECTED], timeout=30, check=True)
