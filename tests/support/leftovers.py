"""What a run may leave behind: processes, shared memory, open files, temporary directories."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def processes(marker: str) -> dict[int, str]:
    """The command lines of all processes that have `marker` in theirs or in their environment; no zombies.

    Both appear a moment after `exec` has begun, and vanish for one while a process names itself: use `within`.
    """
    found: dict[int, str] = {}
    for entry in _entries():
        try:
            line, environment = ((entry / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:  # it has ended, or belongs to another user
            continue
        if line and (marker.encode() in line or marker.encode() in environment):
            found[int(entry.name)] = _readable(line)
    return found


def session(leader: int) -> dict[int, str]:
    """The command lines of all processes in the session of `leader`, which may have ended; no zombies."""
    found: dict[int, str] = {}
    for entry in _entries():
        try:
            state, _, _, number = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(number) == leader and state not in "ZX":
                found[int(entry.name)] = _readable((entry / "cmdline").read_bytes())
        except OSError:
            continue
    return found


def shared_memory() -> set[str]:
    """Files in shared memory with our name."""
    return {path.name for path in Path("/dev/shm").glob("*unisono*")}


def shared_bytes() -> int:
    """All shared memory of this machine, with a name or without."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Shmem:"))


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether `condition` becomes true in time; for events without a notification, such as the end of a grandchild."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _entries() -> list[Path]:
    return [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _readable(line: bytes) -> str:
    return line.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def mappings() -> list[tuple[int, int]]:
    """Where memory files are mapped in this process."""
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if "memfd:unisono" in line]
    return [(int(low, 16), int(high, 16)) for low, high in spans]


def open_files() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
    return found
