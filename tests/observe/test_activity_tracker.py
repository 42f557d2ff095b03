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


def test_the_line_of_a_thread_that_waits_inside_a_library_is_the_users(monkeypatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    go, there = threading.Event(), threading.Event()

    def stuck() -> None:
        there.set()
        go.wait()  # the line where it is stuck

    thread = threading.Thread(target=stuck)
    thread.start()
    there.wait()
    try:
        while (found := user_line(thread.ident or 0)) != f"{HERE}:{line('# the line where it is stuck')} stuck":
            assert found.startswith(HERE), found
    finally:
        go.set()
        thread.join()


def test_who_waits_for_data_is_on_the_line_of_the_thread_that_fetches_it() -> None:
    go, there = threading.Event(), threading.Event()

    def fetch() -> None:
        there.set()
        go.wait()

    thread = threading.Thread(target=fetch, name=f"{LOADER}_0")
    thread.start()
    there.wait()
    try:
        clock = itertools.count(step=1.0)
        watch = ThreadTracker(lambda: next(clock))
        assert watch.activity().line.endswith(" test_who_waits_for_data_is_on_the_line_of_the_thread_that_fetches_it")
        with watch(Phase.DATA):
            assert watch.activity().line.endswith(" fetch")
    finally:
        go.set()
        thread.join()


def test_a_thread_that_has_ended_and_one_without_the_users_code_are_on_no_line() -> None:
    thread = threading.Thread(target=collections.Counter)
    thread.start()
    thread.join()
    assert user_line(thread.ident or 0) == ""


def test_an_error_is_where_the_users_code_was_when_it_came() -> None:
    with pytest.raises(ValueError, match="maxlen") as raised:
        collections.deque(maxlen=-1)  # the line where it came
    assert raised_at(raised.tb).partition(":")[2].startswith(f"{line('# the line where it came')} ")
    assert raised_at(None) == ""


class Wire:
    waits_for = "sum (gradients, message 7)", (1, 2)


def test_what_is_told_is_what_is_seen() -> None:
    seconds = [0.0]
    watch = ThreadTracker(lambda: seconds[0])
    watch.set_phase(Phase.COMPUTE, Wire())
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


def test_without_a_watch_nothing_is_lost_on_the_way() -> None:
    nobody = NullTracker()
    with nobody(Phase.DATA), nobody(Phase.COMPUTE):
        assert list(nobody.each(Phase.DATA, range(3))) == [0, 1, 2]


def test_every_phase_has_words() -> None:
    assert all(Activity(phase).description for phase in Phase)


_LOOKS_WHILE_TENSORS_ARE_COLLECTED = """
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


def test_threads_go_on_while_they_are_looked_at_and_tensors_are_collected() -> None:
    subprocess.run([sys.executable, "-c", _LOOKS_WHILE_TENSORS_ARE_COLLECTED], timeout=30, check=True)
