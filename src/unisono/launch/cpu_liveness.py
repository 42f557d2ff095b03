"""Reports to the coordinator which worker processes are runnable, so that a busy worker is not evicted as frozen.

Heartbeats are late when native code holds the GIL, or when the host is overloaded. In both cases a
thread of the process is running or runnable most of the time, which the launcher can see. A frozen process, or one
that waits for unreachable peers, has no such thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from unisono.membership.http_client import HttpConnection
from unisono.membership.messages import RunningReply
from unisono.membership.protocol import CoordinatorAddress, StepCount

_PATH = "/v1/running"
_SAMPLE_SECONDS = 0.15
_LONG_POLL_SECONDS = 10.0  # longer than the coordinator holds its answer until a heartbeat is late
_ANSWER_SECONDS = 3.0  # longer than the coordinator takes to answer a request that it need not hold
_MIN_DEMAND = 0.5  # the part of the time for which a thread of a busy process is running or runnable, at least


def cpu_demand_seconds(pid: int) -> dict[int, float]:
    """For how many seconds each thread of a process has been running or runnable, by thread id.

    The result is empty where the kernel does not report this (Linux does, see Documentation/scheduler/sched-stats.rst).
    """
    seconds = {}
    with contextlib.suppress(OSError):  # the process has exited
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has exited
                ran, waited, _ = (task / "schedstat").read_text().split()
                seconds[int(task.name)] = (int(ran) + int(waited)) * 1e-9
    return seconds


def is_computing(before: Mapping[int, float], after: Mapping[int, float], seconds: float) -> bool:
    """Whether a thread was running or runnable for most of the time between two results of `cpu_demand_seconds`.

    Args:
        before, after: the results.
        seconds: the time between them.
    """
    return any(demand - before[task] > _MIN_DEMAND * seconds for task, demand in after.items() if task in before)


class CpuMonitor:
    """Samples worker processes in a background thread, and reports the busy ones to the coordinator.

    It is a context manager.

    Attributes:
        step_count: steps of the run, as the coordinator last reported them.

    Raises:
        InvalidInput: as for `HttpConnection`.
    """

    def __init__(self, contact: CoordinatorAddress) -> None:
        self.step_count = StepCount()
        self._contact, self._connection = contact, HttpConnection(contact, _LONG_POLL_SECONDS)
        self._pids: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unisono cpu liveness", daemon=True)
        self._thread.start()

    def process_started(self, worker: str, pid: int) -> None:
        """Sample the process `pid` of `worker` from now on."""
        with self._lock:
            self._pids[worker] = pid

    def process_exited(self, worker: str) -> None:
        """Stop sampling the process of `worker`."""
        with self._lock:
            self._pids.pop(worker, None)

    def fetch_step_count(self) -> StepCount:
        """Ask for the newest `step_count`; waits for the answer for at most three seconds."""
        with contextlib.closing(HttpConnection(self._contact, _ANSWER_SECONDS)) as connection:
            answer = connection.post(_PATH, {"workers": []}, RunningReply)
        if answer is not None:
            self.step_count = answer.steps
        return self.step_count

    def close(self) -> None:
        """Stop sampling."""
        self._closed.set()
        self._connection.cancel()
        self._thread.join()
        self._connection.close()

    def __enter__(self) -> CpuMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        busy: list[str] = []
        while not self._closed.is_set():
            answer = self._connection.post(_PATH, {"workers": busy}, RunningReply)
            if answer is None:  # the coordinator is restarting
                self._closed.wait(_SAMPLE_SECONDS)
                continue
            self.step_count = answer.steps
            busy = self._busy_workers() if answer.late else []

    def _busy_workers(self) -> list[str]:
        with self._lock:
            pids = dict(self._pids)
        before, started = {worker: cpu_demand_seconds(pid) for worker, pid in pids.items()}, time.monotonic()
        self._closed.wait(_SAMPLE_SECONDS)
        seconds = time.monotonic() - started
        return [
            worker for worker, pid in pids.items() if is_computing(before[worker], cpu_demand_seconds(pid), seconds)
        ]
