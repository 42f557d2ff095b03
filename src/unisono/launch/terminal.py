"""The terminal of the launcher, for a worker that is debugged: ``breakpoint()`` there asks whoever sits at it.

Workers are in process groups of their own, and the launcher's is the terminal's foreground group, which Ctrl-C goes to.
A worker that reads from the terminal takes its place meanwhile.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from unisono.errors import UnisonoError

_LOOK_SECONDS = 0.2


def descriptors() -> list[int]:
    """The launcher's input, and an output that is a terminal if there is one; none where it has no input."""
    try:
        os.fstat(0)
    except OSError:
        return []
    return [0, next((number for number in (1, 2) if os.isatty(number)), 1)]


def attach(group: int, given: list[int], pause: Callable[[], None]) -> None:
    """Give this worker the terminal `given`, for its standard input and for ``breakpoint()``.

    Args:
        group: the launcher's process group.
        pause: has the launcher leave the terminal alone; returns when it does.
    """
    raw = _Foreground(given[0], group)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(raw), "utf-8", "surrogateescape")
    output = io.TextIOWrapper(io.FileIO(given[1], "wb", closefd=False), "utf-8", "backslashreplace", write_through=True)
    sys.breakpointhook = _Breakpoint(sys.stdin, output, pause, given[0], group)


def refuse(rank: int) -> None:
    """Have ``breakpoint()`` say what to do: this worker has no terminal."""

    def hook(*_: Any, **__: Any) -> None:
        if os.environ.get("PYTHONBREAKPOINT") != "0":
            raise UnisonoError(
                f"breakpoint() in worker {rank}, which has no terminal: start one worker, or add --debug {rank}"
            )

    sys.breakpointhook = hook


@dataclass(frozen=True)
class _Breakpoint:
    """In place of Python's own, which would read from and write to what a worker has instead of a terminal.

    Args:
        input, output: the terminal.
        pause: has the launcher leave it alone.
        number: of the terminal's descriptor; `group` is the launcher's process group.
    """

    input: TextIO
    output: TextIO
    pause: Callable[[], None]
    number: int
    group: int

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        chosen = os.environ.get("PYTHONBREAKPOINT")
        if chosen == "0":
            return None
        self.pause()
        if chosen:  # a debugger of the user's
            with contextlib.redirect_stdout(self.output), contextlib.redirect_stderr(self.output):
                return sys.__breakpointhook__(*arguments, **keywords)
        from pdb import Pdb

        class Debugger(Pdb):
            """Has the terminal from before a prompt is shown; Ctrl-C while the program runs is the launcher's."""

            def interaction(debugger, *what: Any) -> None:
                with _in_foreground(self.number, self.group), _interruptible():
                    super().interaction(*what)

        return Debugger(stdin=self.input, stdout=self.output, nosigint=True).set_trace(sys._getframe().f_back)


class _Foreground(io.FileIO):
    """Reads from what may be a terminal, in its foreground."""

    def __init__(self, number: int, group: int) -> None:
        super().__init__(number, "rb", closefd=False)
        self._group = group

    def readinto(self, buffer: Any) -> Any:
        with _in_foreground(self.fileno(), self._group), _interruptible():
            return super().readinto(buffer)


@contextlib.contextmanager
def _in_foreground(number: int, launcher: int) -> Iterator[None]:
    """Be the terminal's foreground group in place of the launcher's; once that is, if it is not yet."""
    own = os.getpgrp()
    try:
        while (now := os.tcgetpgrp(number)) not in (launcher, own):
            time.sleep(_LOOK_SECONDS)
    except OSError:  # a pipe, a file
        now = own
    if now == own:
        yield
        return
    _hand_over(number, own)
    try:
        yield
    finally:
        _hand_over(number, launcher)


def _hand_over(number: int, group: int) -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})  # which would stop who is not in front
    try:
        os.tcsetpgrp(number, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C, which a worker ignores, breaks off what is read."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
