"""Ends the command with a message when a signal arrives while the command's modules are still being imported.

This module itself imports little, so that its handlers are installed before the long imports begin.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


def install() -> None:
    """Let SIGTERM and SIGHUP end this process with a message, unless they are ignored or handled."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, exit_now)


def exit_now(number: int, frame: Any = None) -> NoReturn:
    """End this process with the message and exit code of a command that a signal interrupts."""
    print(f"interrupted by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    os._exit(128 + number)  # SystemExit would pass through a module that is half imported
