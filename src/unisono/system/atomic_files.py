"""Files and directories that appear whole or not at all: written under another name, and renamed.

On a network file system a call may fail for a reason that passes, for instance because the server has restarted. Such
calls are repeated a few times here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_PASSING = (errno.ESTALE, errno.EINTR, errno.EAGAIN, errno.EBUSY)
_PAUSES_SECONDS = (0.05, 0.2, 0.5)


def write(path: Path, data: bytes) -> None:
    """Write a private file so that it is there whole or not at all; what was there before stays until then.

    Raises:
        OSError: the file cannot be written.
    """
    _repeated(lambda: _replace(path, data, durably=False))


def write_durably(path: Path, data: bytes) -> None:
    """As `write`, also after a power cut."""

    def attempt() -> None:
        _replace(path, data, durably=True)
        sync_directory(path.parent)

    _repeated(attempt)


def open_to_append(path: str | os.PathLike[str]) -> int:
    """A descriptor that writes behind all that the file `path` holds; it is made, private, if it is not there.

    Raises:
        OSError: the file cannot be written, or it is a symbolic link or a pipe.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a pipe", os.fspath(path))
    return descriptor


def move(source: Path, target: Path) -> None:
    """Rename a file or a directory; a file at `target` is replaced.

    Raises:
        OSError: it cannot be renamed; FileNotFoundError if it is not there.
    """
    moved = _repeated(source.lstat)

    def attempt() -> None:
        try:
            source.rename(target)
        except FileNotFoundError:
            if not os.path.samestat(target.lstat(), moved):  # else a call that failed had its effect all the same
                raise

    _repeated(attempt)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished(directory: Path, name: str) -> list[Path]:
    """What writers of the file `name` in `directory` have left that were killed."""
    return list(directory.glob(f".{name}.*.tmp"))


def _replace(path: Path, data: bytes, *, durably: bool) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        part.unlink(missing_ok=True)  # a killed process of the same number may have left one
        with open(os.open(part, flags, 0o600), "wb") as file:
            file.write(data)
            if durably:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one that tells
            part.unlink()
        raise


def _repeated(call: Callable[[], T]) -> T:
    for pause in _PAUSES_SECONDS:
        try:
            return call()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
        time.sleep(pause)
    return call()
