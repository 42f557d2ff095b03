"""What a run leaves behind: processes, shared memory, temporary directories."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def processes(marker: str) -> dict[int, str]:
    """The command lines of all processes that have `marker` in theirs or in their environment; no zombies."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            line, environment = ((entry / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:  # it ended, or belongs to somebody else
            continue
        if line and (marker.encode() in line or marker.encode() in environment):
            found[int(entry.name)] = line.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return found


def shared_memory() -> set[str]:
    """The files in shared memory that are ours by name."""
    return {path.name for path in Path("/dev/shm").glob("*unisono*")}


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether `condition` comes true in time; for what the kernel tells nobody: the end of a grandchild."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
