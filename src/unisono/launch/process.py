"""What the operating system does with a process of ours: whom it follows into death, and who goes with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37


def die_with(parent: int) -> None:
    """Have the kernel kill this process as soon as the thread of `parent` that started it ends."""
    _set_death_signal(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked, so that no signal will ever come
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Take `die_with` back."""
    _set_death_signal(0)


def kill_group(leader: int) -> None:
    """Kill a process and all that it started and that stayed in its group.

    multiprocessing's resource trackers are spared: they remove the semaphores and the shared memory of processes that
    were killed, and end by themselves once none of those is left.
    """
    try:
        os.killpg(leader, signal.SIGSTOP)  # so that none starts another one meanwhile
    except ProcessLookupError:
        return
    for number in _group(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGCONT if _is_tracker(number) else signal.SIGKILL)


def lead_group(process: int) -> None:
    """Give a child (0: this process) a group of its own; both sides ask, so that neither has to wait."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(process, process)


def age_seconds() -> float:
    """How long ago this process was started; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        started = int(_status("self")[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))
    return 0.0


def has_ended(number: int) -> bool:
    """Whether there is no process of that number, or only what its parent has not yet taken note of."""
    try:
        return _status(str(number))[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _group(leader: int) -> list[int]:
    """The processes in the group of `leader`."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if entry.name.isdecimal() and int(_status(entry.name)[2]) == leader:
                found.append(int(entry.name))
    return found


def _is_tracker(number: int) -> bool:
    with contextlib.suppress(OSError):
        return b"resource_tracker import main" in Path(f"/proc/{number}/cmdline").read_bytes()
    return False


def _status(number: str) -> list[str]:
    """The fields of a process's status from its state on, see proc(5). Raises `OSError`."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()


def adopts() -> bool:
    """Whether this process becomes the parent of descendants whose parent has ended."""
    found = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(found))
    return bool(found.value)


def adopt(descendants: bool) -> None:
    """From now on, have this process become their parent, or the next process above that does."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(descendants))


def _set_death_signal(number: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
