"""Why a run failed: of all that went wrong in its workers, what came first and was no mere consequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from unisono.errors import Diverged, InvalidInput, LoadingFailed, RunFailed, TaskMismatch, UnisonoError, WorkerFailed
from unisono.launch.stop_request import Interrupted
from unisono.system.exit_status import describe as describe

SAY_ALL: dict[str, type[UnisonoError]] = {
    each.__name__: each for each in (InvalidInput, TaskMismatch, Diverged, LoadingFailed, RunFailed, Interrupted)
}
"""Errors whose message says all that there is to say: the launcher raises them again as they were."""


class ScriptExited(WorkerFailed):
    """A worker left by ``sys.exit`` with something else than 0: the exit code that it wants for the run."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(rank, f"exited with {exit_code}")
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.exit_code)


@dataclass(frozen=True)
class Failure:
    """The end of one worker.

    Args:
        rank: of the worker.
        at_seconds: when, on the host's monotonic clock.
        reason: one sentence.
        traceback: as text, empty where there is none.
        consequence: it says that another worker is gone, so that the other's end is likely to be the cause.
        exit_code: what ``sys.exit`` was called with, if it was.
        said: the class and the arguments of an error that says all by itself, if it was one.
        line: of the user's code on which it came, as `unisono.observe.user_frames` names it.
    """

    rank: int
    at_seconds: float
    reason: str
    traceback: str = ""
    consequence: bool = False
    exit_code: int | None = None
    said: tuple[str, Sequence[Any]] | None = None
    line: str = ""

    @property
    def unlike(self) -> bool:
        """Whether the worker would have trained something else than the others, and so never took part."""
        return self.said is not None and self.said[0] == TaskMismatch.__name__

    def error(self) -> UnisonoError:
        """What the launcher raises for it."""
        if self.said is not None:
            name, arguments = self.said
            return SAY_ALL[name](*arguments)
        if self.exit_code is not None:
            return ScriptExited(self.rank, self.exit_code)
        error = WorkerFailed(self.rank, self.reason, self.traceback)
        if self.traceback:
            error.add_note(f"In worker {self.rank}:\n{self.traceback.rstrip()}")
        return error


def first_cause(failures: Iterable[Failure], endings: Mapping[int, str] = MappingProxyType({})) -> Failure:
    """The earliest failure that is no consequence of another; the earliest of all where every one is, with the lines
    on which the workers were, and with the `endings`, in words, of those that had ended before, the likely cause."""
    known = list(failures)
    first = min(known, key=lambda failure: (failure.consequence, failure.at_seconds, failure.rank))
    if not first.consequence:
        return first
    lines = {failure.rank: failure.line for failure in known if failure.line}
    where = ", ".join(f"worker {rank} was at {line}" for rank, line in sorted(lines.items()))
    before = [f"worker {rank} had ended before: {how}" for rank, how in sorted(endings.items())]
    more = [*([where] if len(lines) > 1 else []), *before]
    return replace(first, reason="; ".join([first.reason, *more]))
