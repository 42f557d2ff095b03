"""How a process ended, in words."""

from __future__ import annotations

import signal


def describe(status: int) -> str:
    """A process's end in words; `status` is its exit code, or minus the signal that killed it."""
    if status >= 0:
        return f"ended with exit code {status} and without a result"
    known = {int(number): number for number in signal.Signals}
    if -status not in known:
        return f"killed by signal {-status}"
    number = known[-status]
    return f"killed by {number.name}" + _HINTS.get(number, "")


def ended(status: int) -> str:
    """The same as the predicate of a sentence: ``was killed by SIGKILL``, ``ended with exit code 3``."""
    return f"was {describe(status)}" if status < 0 else f"ended with exit code {status}"


_HINTS = {
    signal.SIGKILL: " (out of memory?)",
    signal.SIGSEGV: " (a fault in native code; the worker's log holds the stack)",
    signal.SIGABRT: " (native code gave up; the worker's log holds the stack)",
    signal.SIGBUS: " (shared memory or a mapped file too small?)",
}
