"""Failures of workers, and which of them caused the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from unisono.errors import Diverged, InvalidInput, LoadingFailed, RunFailed, TaskMismatch, UnisonoError, WorkerFailed
from unisono.launch.stop_request import Interrupted

SELF_EXPLANATORY: dict[str, type[UnisonoError]] = {
    each.__name__: each for each in (InvalidInput, TaskMismatch, Diverged, LoadingFailed, RunFailed, Interrupted)
}
"""Errors whose message is complete without rank and traceback: the launcher raises them again unchanged."""


class ScriptExited(WorkerFailed):
    """A worker called ``sys.exit`` with something other than 0; the run then exits with the same code."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(rank, f"exited with {exit_code}")
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.exit_code)


@dataclass(frozen=True)
class Failure:
    """How one worker failed.

    Args:
        rank: the worker's rank.
        at_seconds: when the worker failed, on the host's monotonic clock.
        reason: why the worker failed, in one sentence.
        traceback: the traceback as text; empty if there is none.
        consequence: whether the worker reported the loss of another worker, whose failure is then probably the cause.
        exit_code: argument of ``sys.exit``, if the worker called it.
        original: class name and arguments of the worker's error, if its class is in `SELF_EXPLANATORY`.
        line: line of the user's code that raised the error, as `unisono.observe.user_frames` formats it.
    """

    rank: int
    at_seconds: float
    reason: str
    traceback: str = ""
    consequence: bool = False
    exit_code: int | None = None
    original: tuple[str, Sequence[Any]] | None = None
    line: str = ""

    @property
    def is_mismatch(self) -> bool:
        """Whether the worker was refused because its task, code or data differs from that of the others."""
        return self.original is not None and self.original[0] == TaskMismatch.__name__

    def error(self) -> UnisonoError:
        """The error that the launcher raises."""
        if self.original is not None:
            name, arguments = self.original
            return SELF_EXPLANATORY[name](*arguments)
        if self.exit_code is not None:
            return ScriptExited(self.rank, self.exit_code)
        error = WorkerFailed(self.rank, self.reason, self.traceback)
        if self.traceback:
            error.add_note(f"In worker {self.rank}:\n{self.traceback.rstrip()}")
        return error


def first_cause(failures: Iterable[Failure], exits: Mapping[int, str] = MappingProxyType({})) -> Failure:
    """The earliest failure that is not the consequence of another one.

    If every failure is a consequence, the result is the earliest of all. Its reason then also names the line at which
    each worker was, and the exits of workers before, which are the probable cause.

    Args:
        exits: how scripts have exited that did not fail, by rank.
    """
    known = list(failures)
    first = min(known, key=lambda failure: (failure.consequence, failure.at_seconds, failure.rank))
    if not first.consequence:
        return first
    lines = {failure.rank: failure.line for failure in known if failure.line}
    where = ", ".join(f"worker {rank} was at {line}" for rank, line in sorted(lines.items()))
    before = [f"worker {rank} had exited before: {how}" for rank, how in sorted(exits.items())]
    more = [*([where] if len(lines) > 1 else []), *before]
    return replace(first, reason="; ".join([first.reason, *more]))
