"""An exception on its way from one process to another, with the lines that it came through."""

from __future__ import annotations

import pickle
import sys
import traceback
from dataclasses import dataclass
from types import FrameType, FunctionType, TracebackType

Line = tuple[str, int, str]
"""File, line number, function."""


@dataclass(frozen=True)
class RemoteException:
    """What `of` took of an exception; can be pickled.

    Args:
        error: without a traceback; one of another class that says the same where it cannot be pickled.
        notes: those that were added to it.
        lines: of the code that it came through, outermost first.
        cause, context, suppressed: as of any exception.
    """

    error: BaseException
    notes: tuple[str, ...]
    lines: tuple[Line, ...]
    cause: RemoteException | None
    context: RemoteException | None
    suppressed: bool

    @staticmethod
    def of(error: BaseException, below: str = "") -> RemoteException:
        """`error` as it is, without the lines that led to the code that raised it, of files whose path begins with
        `below`."""
        lines = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
        while below and lines and lines[0][0].startswith(below):
            del lines[0]
        cause, context = (RemoteException.of(e, below) if e else None for e in (error.__cause__, error.__context__))
        notes = tuple(getattr(error, "__notes__", ()))
        return RemoteException(_portable(error), notes, tuple(lines), cause, context, error.__suppress_context__)

    def rebuild(self) -> BaseException:
        """The exception, to be raised here: its traceback goes on with the lines of the other process."""
        error = self.error.with_traceback(_trace(self.lines))
        if self.notes:
            error.__notes__ = list(self.notes)
        error.__cause__, error.__context__ = (e.rebuild() if e else None for e in (self.cause, self.context))
        error.__suppress_context__ = self.suppressed
        return error


def _portable(error: BaseException) -> BaseException:
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]  # noqa: S301  (made in this line)
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _trace(lines: tuple[Line, ...]) -> TracebackType | None:
    trace: TracebackType | None = None
    for file, number, function in reversed(lines):
        trace = TracebackType(trace, _frame(file, number, function), -1, number)  # -1: nothing to underline
    return trace


def _frame(file: str, number: int, function: str) -> FrameType:
    """A frame that claims to be on that line; the text of the line is looked up in the file."""
    code = _own_frame.__code__.replace(co_filename=file, co_name=function, co_qualname=function, co_firstlineno=number)
    frame: FrameType = FunctionType(code, {"sys": sys})()
    return frame


def _own_frame() -> FrameType:
    return sys._getframe()
