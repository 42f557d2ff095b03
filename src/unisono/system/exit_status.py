"""Describes exit statuses of processes as text."""

from __future__ import annotations

import signal


def describe_exit(status: int) -> str:
    """How a process exited that returned no result: ``killed by SIGBUS (shared memory …)``.

    `status` is its exit code, or minus the number of the signal that killed it.
    """
    if status >= 0:
        return f"ended with exit code {status} and without a result"
    known = {int(number): number for number in signal.Signals}
    if -status not in known:
        return f"killed by signal {-status}"
    number = known[-status]
    return f"killed by {number.name}" + _HINTS.get(number, "")


def exit_clause(status: int) -> str:
    """How a process exited, as the predicate of a sentence: ``was killed by SIGTERM``, ``ended with exit code 3``."""
    return f"was {describe_exit(status)}" if status < 0 else f"ended with exit code {status}"


_HINTS = {
    signal.SIGKILL: " (out of memory?)",
    signal.SIGSEGV: " (a fault in native code; the worker's log has the stack)",
    signal.SIGABRT: " (native code aborted; the worker's log has the stack)",
    signal.SIGBUS: " (shared memory or a mapped file too small?)",
}
