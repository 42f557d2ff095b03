"""How a signal ends the command while its modules are being imported. Imports next to nothing, to be there first."""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


def listen() -> None:
    """From now on, SIGTERM and SIGHUP end this process in words, unless they are ignored or handled."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


def end(number: int, frame: Any = None) -> NoReturn:
    """End this process as the command does that a signal interrupts."""
    print(f"interrupted by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    os._exit(128 + number)  # what SystemExit would run through was interrupted in the middle of an import
