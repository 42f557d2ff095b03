"""Handles signals and closed output streams of a command, outside the launcher's event loop."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unisono.system import early_exit
from unisono.system.output_streams import unfailing


class SignalReceived(KeyboardInterrupt):
    """A signal has asked this process to end.

    Args:
        number: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)


def interrupt_output(error: KeyboardInterrupt) -> tuple[str, int]:
    """The output and the exit code of a command that `error` ends: 130 after SIGINT, 143 after SIGTERM."""
    number = error.number if isinstance(error, SignalReceived) else signal.SIGINT
    return f"interrupted by {signal.Signals(number).name}", 128 + number


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `SignalReceived`, unless they are ignored (``nohup``).

    Each signal raises only once: a terminal that is closed sends SIGHUP several times, ``timeout`` sends SIGTERM twice.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        signal.signal(number, lambda *_: None)
        raise SignalReceived(number)

    previous = {
        n: signal.signal(n, handle)
        for n in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(n) in (signal.SIG_DFL, early_exit.exit_now)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def ignoring_output_errors() -> Iterator[None]:
    """Discard output that cannot be written, instead of ending the command.

    A standard stream that is closed is opened as the null device. Otherwise a file that is opened later would get its
    descriptor, and the output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `descriptor`
    previous = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_unfailing(stream, original, number) for stream, original, number in
                              ((sys.stdout, sys.__stdout__, 1), (sys.stderr, sys.__stderr__, 2)))  # fmt: skip
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = previous


def _unfailing(stream: Any, original: Any, descriptor: int) -> Any:
    """An unfailing stream in place of `stream` if that is the interpreter's `original` (None: it was closed)."""
    if stream is not original:
        return stream
    if original is None:
        return unfailing(descriptor)
    return unfailing(descriptor, original.encoding, line_buffering=original.line_buffering)
