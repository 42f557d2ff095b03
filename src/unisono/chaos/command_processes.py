"""Starts an `unisono` command, and finds its processes by their titles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_START = (
    "import runpy, sys; from unisono.system.process import exit_with_parent; exit_with_parent(int(sys.argv.pop(1)));"
    "runpy.run_module('unisono', run_name='__main__', alter_sys=True)"
)
_WORKER, _COORDINATOR = "unisono worker ", "unisono coordinator"


class Command:
    """An ``unisono`` command as the leader of a session. It is killed when this process exits.

    Args:
        words: the arguments of the command.
        log: the file that receives the command's output.
        before: words before the command, such as ``ip netns exec NAME``, that select where it runs.
    """

    def __init__(self, words: Sequence[str], log: Path, before: Sequence[str] = ()) -> None:
        line = [*before, sys.executable, "-c", _START, str(os.getpid()), *words]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self.log = log
        self._workers: dict[str, int] = {}

    def has_ended(self, seconds: float) -> bool:
        """Wait up to `seconds` for the command to end; returns whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def output(self) -> str:
        """The command's output so far."""
        return self.log.read_text(errors="replace")

    def worker(self, name: str) -> int | None:
        """The process ID of the worker `name`; None if this command has not, or not yet, started such a worker."""
        if name not in self._workers:
            self._workers |= self.workers()
        return self._workers.get(name)

    def workers(self) -> dict[str, int]:
        """The process IDs of all current workers, by name."""
        return {title.removeprefix(_WORKER): pid for pid, title in self._all() if title.startswith(_WORKER)}

    def coordinator(self) -> int | None:
        """The process ID of the current coordinator; None if there is none."""
        return next((pid for pid, title in self._all() if title == _COORDINATOR), None)

    def end(self) -> None:
        """Kill all processes of the command that still run."""
        left = [pid for pid, _ in self._all()]
        for pid in [self.process.pid] * (self.process.poll() is None) + left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _all(self) -> Iterator[tuple[int, str]]:
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and _session(entry) == self.process.pid:
                with suppress(OSError):  # the process has ended just now
                    yield int(entry.name), (entry / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")


def _session(entry: Path) -> int:
    with suppress(OSError):
        state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        return int(session) if state not in "ZX" else -1
    return -1
