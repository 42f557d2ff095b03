"""On which line of the user's own code a thread is."""

from __future__ import annotations

import faulthandler
import os
import re
import sysconfig
import threading
from functools import cache
from pathlib import Path
from types import TracebackType

LOADER = "unisono loader"  # how the names of threads begin in which the data set's code runs
_MOST_BYTES = 1 << 20
_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_TASKS = os.path.join(_OURS, "tasks", "builtin", "")  # what a user writes, written by us
_INSTALLED = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
_NOT_THEIRS = ("<", *(os.path.realpath(path) + os.sep for path in _INSTALLED))  # "<": code that stands in no file


def line_of(thread: int, *, loading: bool = False) -> str:
    """``file.py:12 function``: the innermost line of the user's code that `thread` is on; empty: it is on none.

    Args:
        loading: it waits for data; in a thread that fetches some, is what it waits for.
    """
    told = _told()
    if loading:
        for other in threading.enumerate():
            if other.name.startswith(LOADER) and (found := dumped(told.get(other.ident or 0, ""))):
                return found
    return dumped(told.get(thread, ""))


def _told() -> dict[int, str]:
    """The lines of each thread, innermost first, as `dumped` reads them.

    The interpreter writes them down while nothing else runs. `sys._current_frames` will not do: other threads go on
    while their frames are looked at, which Python 3.11 does not always survive; and up to 3.11.8 it collects garbage
    under a lock of the interpreter's, where a tensor that is freed lets a thread run that waits for that lock for ever.
    """
    file = os.memfd_create("stacks")
    try:
        faulthandler.dump_traceback(file)
        text = os.pread(file, _MOST_BYTES, 0).decode(errors="replace")
    finally:
        os.close(file)
    return {int(thread, 16): lines for thread, lines in _THREAD.findall(text)}


def raised_at(trace: TracebackType | None) -> str:
    """The same for an error: the last line of the user's on the way to where it was raised."""
    found = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_theirs(code.co_filename):
            found = f"{named(code.co_filename)}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return found


def exit_in_words(leave: SystemExit) -> str:
    """``user code called sys.exit(0) on file.py:12 function``."""
    called = "sys.exit()" if leave.code is None else f"sys.exit({leave.code!r})"
    line = raised_at(leave.__traceback__)
    return f"user code called {called}" + (f" on {line}" if line else "")


def dumped(text: str) -> str:
    """The same for a thread of which `faulthandler` has told the lines, innermost first; perhaps of another process."""
    for file, line, function in _DUMPED.findall(text):
        if is_theirs(file):
            return f"{named(file)}:{line} {function}"
    return ""


_DUMPED = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.M)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*\n((?:  .*\n)*)", re.M)


@cache
def is_theirs(file: str) -> bool:
    """Whether the user wrote that file: it is neither ours, nor Python's, nor of what was installed."""
    path = file if file.startswith("<") else os.path.realpath(file)
    if path.startswith(_TASKS):
        return True
    return not path.startswith((_OURS, *_NOT_THEIRS)) and f"{os.sep}site-packages{os.sep}" not in path


def named(file: str) -> str:
    """Relative to the working directory, where it lies in there."""
    here = os.getcwd() + os.sep
    whole = os.path.abspath(file)
    return whole.removeprefix(here)
