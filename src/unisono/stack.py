"""On which line of the user's own code a thread is."""

from __future__ import annotations

import gc
import os
import re
import sys
import sysconfig
import threading
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

LOADER = "unisono loader"  # how the names of threads begin in which the data set's code runs
_LISTING = threading.RLock()  # a signal handler may look, too
_OURS = str(Path(__file__).resolve().parent) + os.sep
_TASKS = _OURS + "tasks" + os.sep  # what a user writes, written by us
_INSTALLED = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
_NOT_THEIRS = ("<", *(os.path.realpath(path) + os.sep for path in _INSTALLED))  # "<": code that stands in no file


def line_of(thread: int, *, loading: bool = False) -> str:
    """``file.py:12 function``: the innermost line of the user's code that `thread` is on; empty: it is on none.

    Args:
        loading: it waits for data; in a thread that fetches some, is what it waits for.
    """
    frames = _frames()
    if loading:
        for other in threading.enumerate():
            if other.name.startswith(LOADER) and (found := innermost(frames.get(other.ident or 0))):
                return found
    return innermost(frames.get(thread))


def _frames() -> dict[int, FrameType]:
    """Of all threads. Python up to 3.11.8 collects garbage while it lists them under a lock of the interpreter's; a
    tensor that is freed then lets other threads run, and the first one that wants that lock waits for ever, with the
    interpreter's own lock in its hands."""
    with _LISTING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def innermost(frame: FrameType | None) -> str:
    """The same for a thread whose innermost line of all is in `frame`."""
    while frame is not None:
        if is_theirs(frame.f_code.co_filename):
            return f"{named(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def raised_at(trace: TracebackType | None) -> str:
    """The same for an error: the last line of the user's on the way to where it was raised."""
    found = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_theirs(code.co_filename):
            found = f"{named(code.co_filename)}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return found


def dumped(text: str) -> str:
    """The same for a thread of which another process's `faulthandler` has told the lines, innermost first."""
    for file, line, function in _DUMPED.findall(text):
        if is_theirs(file):
            return f"{named(file)}:{line} {function}"
    return ""


_DUMPED = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.M)


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
