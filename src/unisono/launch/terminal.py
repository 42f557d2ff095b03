"""Gives a worker the launcher's terminal, for ``breakpoint()`` and standard input.

Each worker has its own process group. The foreground group of the terminal, which Ctrl-C signals, is the launcher's. A
worker makes its group the foreground group while it reads.
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

_POLL_SECONDS = 0.2


def terminal_descriptors() -> list[int]:
    """Descriptors of the launcher's input and output; empty if the launcher has no input.

    The output is a terminal if one of the launcher's output streams is a terminal.
    """
    try:
        os.fstat(0)
    except OSError:
        return []
    return [0, next((number for number in (1, 2) if os.isatty(number)), 1)]


def attach_terminal(group: int, descriptors: list[int], pause: Callable[[], None]) -> None:
    """Use the terminal `descriptors` for standard input and ``breakpoint()`` of this worker.

    Args:
        group: the launcher's process group.
        pause: stops the launcher's output to the terminal, and returns when it has stopped.
    """
    raw = _Foreground(descriptors[0], group)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(raw), "utf-8", "surrogateescape")
    output = io.TextIOWrapper(
        io.FileIO(descriptors[1], "wb", closefd=False), "utf-8", "backslashreplace", write_through=True
    )
    sys.breakpointhook = _Breakpoint(sys.stdin, output, pause, descriptors[0], group)


def refuse_breakpoint(rank: int) -> None:
    """Let ``breakpoint()`` raise an error that names the option by which this worker would have a terminal."""

    def hook(*_: Any, **__: Any) -> None:
        if os.environ.get("PYTHONBREAKPOINT") != "0":
            raise UnisonoError(
                f"breakpoint() in worker {rank}, which has no terminal: start one worker, or add --debug {rank}"
            )

    sys.breakpointhook = hook


@dataclass(frozen=True)
class _Breakpoint:
    """Replaces `sys.__breakpointhook__`, which would read the null device and write to the log.

    Args:
        input, output: the terminal.
        pause: stops the launcher's output to the terminal.
        descriptor: a descriptor of the terminal.
        group: the launcher's process group.
    """

    input: TextIO
    output: TextIO
    pause: Callable[[], None]
    descriptor: int
    group: int

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        chosen = os.environ.get("PYTHONBREAKPOINT")
        if chosen == "0":
            return None
        self.pause()
        if chosen:  # a debugger that the user has chosen
            with contextlib.redirect_stdout(self.output), contextlib.redirect_stderr(self.output):
                return sys.__breakpointhook__(*arguments, **keywords)
        from pdb import Pdb

        class Debugger(Pdb):
            """pdb in the foreground while it shows a prompt; the launcher handles Ctrl-C while the program runs."""

            def interaction(debugger, *arguments: Any) -> None:
                with _in_foreground(self.descriptor, self.group), _interruptible():
                    super().interaction(*arguments)

        return Debugger(stdin=self.input, stdout=self.output, nosigint=True).set_trace(sys._getframe().f_back)


class _Foreground(io.FileIO):
    """A file that this process reads in the foreground if the file is a terminal."""

    def __init__(self, number: int, group: int) -> None:
        super().__init__(number, "rb", closefd=False)
        self._group = group

    def readinto(self, buffer: Any) -> Any:
        with _in_foreground(self.fileno(), self._group), _interruptible():
            return super().readinto(buffer)


@contextlib.contextmanager
def _in_foreground(descriptor: int, launcher: int) -> Iterator[None]:
    """A context in which this process group is the foreground group; waits until the launcher's group is it."""
    own = os.getpgrp()
    try:
        while (foreground := os.tcgetpgrp(descriptor)) not in (launcher, own):
            time.sleep(_POLL_SECONDS)
    except OSError:  # the descriptor is a pipe or a file
        foreground = own
    if foreground == own:
        yield
        return
    _set_foreground(descriptor, own)
    try:
        yield
    finally:
        _set_foreground(descriptor, launcher)


def _set_foreground(descriptor: int, group: int) -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})  # this signal would stop the process
    try:
        os.tcsetpgrp(descriptor, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """A context in which Ctrl-C, which a worker otherwise ignores, interrupts a read."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
