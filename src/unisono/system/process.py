"""Process control: parent-death signal, process groups, subreaper, and status from ``/proc``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37


def exit_with_parent(parent: int) -> None:
    """Let the kernel kill this process as soon as the thread that started it, of process `parent`, ends.

    Kills this process at once if `parent` has exited already.
    """
    _set_death_signal(signal.SIGKILL)
    if os.getppid() != parent:  # the parent exited before the call above, so the kernel sends no signal
        os.kill(os.getpid(), signal.SIGKILL)


def clear_parent_death_signal() -> None:
    """Undo `exit_with_parent`."""
    _set_death_signal(0)


def kill_group(leader: int) -> None:
    """Kill all processes of the process group that `leader` leads.

    multiprocessing's resource trackers are spared: they remove the semaphores and the shared memory of killed
    processes, and then exit.
    """
    try:
        os.killpg(leader, signal.SIGSTOP)  # so that no process is started meanwhile
    except ProcessLookupError:
        return
    for pid in _group(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT if _is_resource_tracker(pid) else signal.SIGKILL)


def make_group_leader(pid: int) -> None:
    """Make the child `pid` (0: this process) the leader of a new process group.

    Parent and child both call this function, so that neither has to wait for the other.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)


def age_seconds() -> float:
    """Seconds since this process was started; 0 if the system does not report it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        start_ticks = int(_stat("self")[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0


def has_exited(pid: int) -> bool:
    """Whether the process has exited.

    A zombie, for which its parent has not waited yet, has exited. Without ``/proc``, a zombie counts as running.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # the process exists, and belongs to another user
    try:
        return _stat(str(pid))[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return os.path.exists("/proc/self/stat")


def parent_pid(pid: int) -> int:
    """The pid of the parent of process `pid`. Raises `OSError` if there is no such process."""
    return int(_stat(str(pid))[1])


def _group(leader: int) -> list[int]:
    """The pids of the process group that `leader` leads."""
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # the process has exited meanwhile
            if entry.name.isdecimal() and int(_stat(entry.name)[2]) == leader:
                pids.append(int(entry.name))
    return pids


def _is_resource_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"resource_tracker import main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _stat(pid: str) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` from the state on, see proc(5). Raises `OSError`."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_subreaper() -> bool:
    """Whether this process becomes the parent of descendants whose parent has exited."""
    value = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value))
    return bool(value.value)


def set_subreaper(enabled: bool) -> None:
    """Set whether this process becomes the parent of descendants whose parent has exited."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(enabled))


def _set_death_signal(number: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
