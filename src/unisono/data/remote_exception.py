"""Sends an exception to another process together with the lines of its traceback."""

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
    """An exception as a value that can be pickled.

    Args:
        error: the exception without its traceback; a RuntimeError with the same text if it cannot be pickled.
        notes: the notes that were added to the exception.
        lines: the lines of its traceback, outermost first.
        cause, context, suppressed: its ``__cause__``, ``__context__`` and ``__suppress_context__``.
    """

    error: BaseException
    notes: tuple[str, ...]
    lines: tuple[Line, ...]
    cause: RemoteException | None
    context: RemoteException | None
    suppressed: bool

    @staticmethod
    def of(error: BaseException, below: str = "") -> RemoteException:
        """`error` without the outermost lines of its traceback that are in files whose path begins with `below`."""
        lines = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
        while below and lines and lines[0][0].startswith(below):
            del lines[0]
        cause, context = (RemoteException.of(e, below) if e else None for e in (error.__cause__, error.__context__))
        notes = tuple(getattr(error, "__notes__", ()))
        return RemoteException(_portable(error), notes, tuple(lines), cause, context, error.__suppress_context__)

    def rebuild(self) -> BaseException:
        """The exception, to be raised here; its traceback continues with the lines of the other process."""
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
        trace = TracebackType(trace, _frame(file, number, function), -1, number)  # -1: no instruction to underline
    return trace


def _frame(file: str, number: int, function: str) -> FrameType:
    """A frame with that position; the text of the line is looked up in the file."""
    code = _own_frame.__code__.replace(co_filename=file, co_name=function, co_qualname=function, co_firstlineno=number)
    frame: FrameType = FunctionType(code, {"sys": sys})()
    return frame


def _own_frame() -> FrameType:
    return sys._getframe()
