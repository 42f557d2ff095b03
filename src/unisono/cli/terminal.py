"""A command and its terminal: signals before the workers have started, and standard output that is closed."""

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
    """This process was asked to end by a signal.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)


def ending(error: KeyboardInterrupt) -> tuple[str, int]:
    """What a command says, and its exit code, where `error` ends it: 130 after SIGINT, 143 after SIGTERM."""
    number = error.number if isinstance(error, SignalReceived) else signal.SIGINT
    return f"interrupted by {signal.Signals(number).name}", 128 + number


@contextmanager
def endable() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise `SignalReceived`, as Ctrl-C raises KeyboardInterrupt, unless they are ignored
    (``nohup``).

    Each is raised once: a terminal that closes sends SIGHUP several times, ``timeout`` sends SIGTERM twice.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:
        signal.signal(number, lambda *_: None)
        raise SignalReceived(number)

    former = {
        n: signal.signal(n, ask)
        for n in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(n) in (signal.SIG_DFL, early_exit.exit_now)
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def going_on_unread() -> Iterator[None]:
    """Have output that cannot be written be lost, in place of ending the command.

    A standard stream that was closed at the start leads to nowhere: else a file that is opened later would get its
    number, and the output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    former = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_kept(stream, own, number) for stream, own, number in
                              ((sys.stdout, sys.__stdout__, 1), (sys.stderr, sys.__stderr__, 2)))  # fmt: skip
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = former


def _kept(stream: Any, own: Any, descriptor: int) -> Any:
    """`stream`, or an unfailing one in its place if it is the interpreter's `own`; that is None if it was closed."""
    if stream is not own:
        return stream
    if own is None:
        return unfailing(descriptor)
    return unfailing(descriptor, own.encoding, line_buffering=own.line_buffering)
