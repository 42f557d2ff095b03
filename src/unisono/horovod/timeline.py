"""Records operations as a file that Chrome's trace viewer and Perfetto open."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from unisono.horovod.handle import Handle


class Timeline:
    """Events of worker 0, from `start` to `stop`: one row for each name of an operation.

    The time from submission to agreement is ``NEGOTIATE_ALLREDUCE`` and so on, the time after that ``ALLREDUCE``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._marks_cycles = False
        self._events: list[dict[str, Any]] = []
        self._rows: dict[str, int] = {}

    def start(self, path: Path, marks_cycles: bool) -> None:
        """Record from now on, for a file at `path`; writes what was recorded before."""
        self.stop()
        with self._lock:
            path.touch()  # an error now, and not after training
            self._path, self._marks_cycles, self._rows = path, marks_cycles, {}
            began = {"start_time_since_epoch_in_micros": round(time.time() * 1e6)}
            self._events = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "batches", **began}}]

    def stop(self) -> None:
        """Write the file, and record nothing more. No effect where nothing is recorded."""
        with self._lock:
            if self._path is not None:
                self._path.write_text("[\n" + ",\n".join(map(json.dumps, self._events)) + "\n]\n")
            self._path, self._events = None, []

    def batch(self, at: float) -> None:
        """Mark the time at which a batch of operations begins."""
        with self._lock:
            if self._path is not None and self._marks_cycles:
                self._events.append({"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": at * 1e6})

    def finished(self, handle: Handle) -> None:
        """Record an operation that has ended."""
        name, what, times = handle.request.name, handle.request.verb.upper(), handle.times
        agreed = times.agreed or times.finished
        self._add(name, (f"NEGOTIATE_{what}", times.submitted, agreed), (what, agreed, times.finished))

    def exchanged(self, name: str, began: float) -> None:
        """Record an exchange of gradients, without negotiation, that began at that time, and has ended."""
        self._add(name, ("ALLREDUCE", began, time.time()))

    def _add(self, name: str, *stages: tuple[str, float, float]) -> None:
        """Record stages of an operation: their label, begin and end."""
        with self._lock:
            if self._path is None:
                return
            if name not in self._rows:
                row = self._rows[name] = len(self._rows) + 1
                self._events.append({"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}})
            for label, begin, end in stages:
                span = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
                self._events.append({"name": label, "ph": "X", "pid": self._rows[name], "tid": 0, **span})
