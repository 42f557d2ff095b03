"""Limits the CPU time of a group of processes by a control group (version 1, controller ``cpu``)."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.netlab.errors import Unavailable

PERIOD_MICROSECONDS = 20_000  # short against a training step, long against the kernel's tick


@contextmanager
def cpu_quota(name: str, cores: float) -> Iterator[Path]:
    """A control group whose processes together get at most `cores` cores; one joins by its ``cgroup.procs``.

    What is in it at the end of the block is killed.

    Raises:
        Unavailable: there is no such controller, or the kernel refuses.
    """
    group = controller() / name
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
        (group / "cpu.cfs_quota_us").write_text(str(max(1000, round(cores * PERIOD_MICROSECONDS))))
    except OSError as error:
        raise Unavailable(f"no control group can be made: {error}") from error
    try:
        yield group
    finally:
        remove(group)


def remove(group: Path) -> None:
    """Kill whatever is still in `group`, and remove it: a process that was killed leaves it a moment later."""
    deadline = time.monotonic() + 5.0
    while True:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            return group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def controller(kind: str = "cpu") -> Path:
    """The directory of this process's control group of the controller `kind`.

    Raises:
        Unavailable: it is not mounted.
    """
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    mounted = next((m[1] for m in mounts if m[2] == "cgroup" and kind in m[3].split(",")), None)
    if mounted is None or not os.access(mounted, os.W_OK):
        raise Unavailable(f"control groups of version 1 with the controller {kind} are not mounted, or read-only")
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    inside = next((path for _, names, path in lines if kind in names.split(",")), "/")
    ours = Path(mounted, inside.lstrip("/"))
    return ours if ours.exists() else Path(mounted)
