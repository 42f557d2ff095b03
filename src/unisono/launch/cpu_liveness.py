"""Reports to the coordinator which worker processes are runnable, so that a busy one is not evicted as frozen.

Heartbeats are late when native code holds the interpreter's lock, or when the host is overloaded. In both cases a
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
from unisono.membership.messages import LookMessage
from unisono.membership.protocol import CoordinatorAddress, StepCount

_PATH = "/v1/running"
_LOOK_SECONDS = 0.15
_ANSWER_SECONDS = 10.0  # longer than the coordinator waits for somebody to be late
_LATEST_SECONDS = 3.0  # longer than the coordinator takes to answer who asks
_MOSTLY = 0.5  # of the time


def wanted_seconds(pid: int) -> dict[int, float]:
    """Seconds that each thread of a process has run, or has waited for a processor, in all; nothing where the system
    does not say so (Linux does, Documentation/scheduler/sched-stats.rst)."""
    found = {}
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # so has a thread
                ran, waited, _ = (task / "schedstat").read_text().split()
                found[int(task.name)] = (int(ran) + int(waited)) * 1e-9
    return found


def computes(before: Mapping[int, float], after: Mapping[int, float], seconds: float) -> bool:
    """Whether a thread wanted a processor for most of the `seconds` between two looks at `wanted_seconds`."""
    return any(wanted - before[task] > _MOSTLY * seconds for task, wanted in after.items() if task in before)


class CpuMonitor:
    """Looks at the processes that it is told of, from a thread of its own. A context.

    Attributes:
        count: of steps, as the coordinator last said.

    Raises:
        InvalidInput: as `HttpConnection`.
    """

    def __init__(self, contact: CoordinatorAddress) -> None:
        self.count = StepCount()
        self._contact, self._line = contact, HttpConnection(contact, _ANSWER_SECONDS)
        self._pids: dict[str, int] = {}
        self._changed = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="unisono vouching", daemon=True)
        self._thread.start()

    def began(self, worker: str, pid: int) -> None:
        """The process of that name is there."""
        with self._changed:
            self._pids[worker] = pid

    def ended(self, worker: str) -> None:
        """It is no more."""
        with self._changed:
            self._pids.pop(worker, None)

    def latest(self) -> StepCount:
        """As `count`, but asked for now; waits for the answer, some seconds at most."""
        with contextlib.closing(HttpConnection(self._contact, _LATEST_SECONDS)) as line:
            answer = line.post(_PATH, {"workers": []}, LookMessage)
        if answer is not None:
            self.count = answer.count
        return self.count

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        self._line.cut()
        self._thread.join()
        self._line.close()

    def __enter__(self) -> CpuMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look(self) -> None:
        busy: list[str] = []
        while not self._closed.is_set():
            answer = self._line.post(_PATH, {"workers": busy}, LookMessage)
            if answer is None:  # nobody is there: it is asked again
                self._closed.wait(_LOOK_SECONDS)
                continue
            self.count = answer.count
            busy = self._busy() if answer.late else []

    def _busy(self) -> list[str]:
        with self._changed:
            pids = dict(self._pids)
        before, began = {worker: wanted_seconds(pid) for worker, pid in pids.items()}, time.monotonic()
        self._closed.wait(_LOOK_SECONDS)
        seconds = time.monotonic() - began
        return [worker for worker, pid in pids.items() if computes(before[worker], wanted_seconds(pid), seconds)]
