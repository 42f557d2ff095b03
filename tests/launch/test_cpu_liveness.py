"""Which processes count as runnable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.leftovers import within
from unisono.launch.cpu_liveness import cpu_demand_seconds, is_computing

HOLDS_THE_INTERPRETER = "print(flush=True); [pow(7, 1 << 20) for _ in range(1 << 30)]"
WAITS = "print(flush=True); import threading; threading.Event().wait()"


def wants(pid: int, seconds: float = 0.3) -> bool:
    before, began = cpu_demand_seconds(pid), time.monotonic()
    time.sleep(seconds)  # what is measured is what happens meanwhile
    return is_computing(before, cpu_demand_seconds(pid), time.monotonic() - began)


@pytest.mark.parametrize(("code", "stopped", "expected"), [
    (HOLDS_THE_INTERPRETER, False, True), (HOLDS_THE_INTERPRETER, True, False), (WAITS, False, False),
])  # fmt: skip
def test_a_computing_process_is_runnable_and_a_waiting_or_stopped_one_is_not(code, stopped, expected) -> None:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            if stopped:
                os.kill(process.pid, signal.SIGSTOP)
            assert within(10, lambda: wants(process.pid) == expected)
        finally:
            process.kill()


def test_nothing_is_seen_of_a_process_that_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert cpu_demand_seconds(process.pid) == {}


def test_a_thread_counts_from_the_second_look_on() -> None:
    assert not is_computing({}, {1: 9.0}, 1.0)
    assert is_computing({1: 9.0, 2: 0.0}, {1: 9.1, 2: 0.6}, 1.0)
    assert not is_computing({1: 9.0, 2: 0.0}, {1: 9.4, 2: 0.4}, 1.0)
