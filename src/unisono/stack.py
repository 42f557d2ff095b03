"""On which line of the user's own code a thread is."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType

LOADER = "unisono loader"  # how the names of threads begin in which the data set's code runs
_OURS = str(Path(__file__).resolve().parent) + os.sep
_TASKS = _OURS + "tasks" + os.sep  # what a user writes, written by us
_INSTALLED = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
_NOT_THEIRS = ("<", *(os.path.realpath(path) + os.sep for path in _INSTALLED))  # "<": code that stands in no file


def line_of(thread: int, *, loading: bool = False) -> str:
    """``file.py:12 function``: the innermost line of the user's code that `thread` is on; empty: it is on none.

    Args:
        loading: it waits for data; in a thread that fetches some, is what it waits for.
    """
    frames = sys._current_frames()
    if loading:
        for other in threading.enumerate():
            if other.name.startswith(LOADER) and (found := innermost(frames.get(other.ident or 0))):
                return found
    return innermost(frames.get(thread))


def innermost(frame: FrameType | None) -> str:
    """The same for a thread whose innermost line of all is in `frame`."""
    while frame is not None:
        if is_theirs(frame.f_code):
            return f"{named(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def raised_at(trace: TracebackType | None) -> str:
    """The same for an error: the last line of the user's on the way to where it was raised."""
    found = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_theirs(code):
            found = f"{named(code.co_filename)}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return found


@cache
def is_theirs(code: CodeType) -> bool:
    """Whether the user wrote it: it is neither ours, nor Python's, nor of what was installed."""
    path = code.co_filename if code.co_filename.startswith("<") else os.path.realpath(code.co_filename)
    if path.startswith(_TASKS):
        return True
    return not path.startswith((_OURS, *_NOT_THEIRS)) and f"{os.sep}site-packages{os.sep}" not in path


def named(file: str) -> str:
    """Relative to the working directory, where it lies in there."""
    here = os.getcwd() + os.sep
    whole = os.path.abspath(file)
    return whole.removeprefix(here)
