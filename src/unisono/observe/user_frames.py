"""The line of user code that a thread is on."""

from __future__ import annotations

import faulthandler
import os
import re
import sysconfig
import threading
from functools import cache
from pathlib import Path
from types import TracebackType

LOADER = "unisono loader"  # prefix of the names of threads that run the data set's code
_MAX_BYTES = 1 << 20
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_TASKS = os.path.join(_PACKAGE, "tasks", "builtin", "")  # counts as user code
_INSTALLED = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
_NOT_USER_CODE = ("<", *(os.path.realpath(path) + os.sep for path in _INSTALLED))  # "<": code without a file


def user_line(thread: int, *, loading: bool = False) -> str:
    """``file.py:12 function``: the innermost line of user code that `thread` is on; empty: none.

    Args:
        loading: the thread waits for data; a line in a thread that loads data comes first.
    """
    stacks = _stacks()
    if loading:
        for other in threading.enumerate():
            if other.name.startswith(LOADER) and (line := user_line_of_dump(stacks.get(other.ident or 0, ""))):
                return line
    return user_line_of_dump(stacks.get(thread, ""))


def _stacks() -> dict[int, str]:
    """The stack of each thread, innermost line first, as `user_line_of_dump` reads it.

    `faulthandler` writes all stacks while no other thread runs. `sys._current_frames` is not safe: other threads run
    while their frames are read, which can crash Python 3.11. Up to 3.11.8 it also collects garbage under a lock of the
    interpreter: freeing a tensor there may let a thread run that waits for this lock, which is a deadlock.
    """
    file = os.memfd_create("stacks")
    try:
        faulthandler.dump_traceback(file)
        text = os.pread(file, _MAX_BYTES, 0).decode(errors="replace")
    finally:
        os.close(file)
    return {int(thread, 16): lines for thread, lines in _THREAD.findall(text)}


def raised_at(trace: TracebackType | None) -> str:
    """The innermost line of user code in the traceback of an error, in the form of `user_line`."""
    line = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_user_code(code.co_filename):
            line = f"{relative_path(code.co_filename)}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return line


def describe_exit(error: SystemExit) -> str:
    """How user code ended the process, as text: ``user code called sys.exit(0) on file.py:12 function``."""
    call = "sys.exit()" if error.code is None else f"sys.exit({error.code!r})"
    line = raised_at(error.__traceback__)
    return f"user code called {call}" + (f" on {line}" if line else "")


def user_line_of_dump(text: str) -> str:
    """The innermost line of user code in a stack that `faulthandler` wrote, perhaps in another process."""
    for file, line, function in _DUMPED.findall(text):
        if is_user_code(file):
            return f"{relative_path(file)}:{line} {function}"
    return ""


_DUMPED = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.M)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*\n((?:  .*\n)*)", re.M)


@cache
def is_user_code(file: str) -> bool:
    """Whether a file is user code: not of this package, nor of Python, nor of an installed package."""
    path = file if file.startswith("<") else os.path.realpath(file)
    if path.startswith(_TASKS):
        return True
    return not path.startswith((_PACKAGE, *_NOT_USER_CODE)) and f"{os.sep}site-packages{os.sep}" not in path


def relative_path(file: str) -> str:
    """The path relative to the working directory, if the file is in it."""
    return os.path.abspath(file).removeprefix(os.getcwd() + os.sep)
