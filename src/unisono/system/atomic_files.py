"""Writes files atomically: under a temporary name, then renamed.

On a network file system a call may fail for a transient reason, for instance because the server has restarted. Such
calls are retried a few times here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_TRANSIENT = (errno.ESTALE, errno.EINTR, errno.EAGAIN, errno.EBUSY)
_PAUSES_SECONDS = (0.05, 0.2, 0.5)


def write(path: Path, data: bytes) -> None:
    """Write `data` to the file `path` atomically; only the file's owner may read it.

    A file that exists at `path` stays unchanged until all of `data` is written, and is then replaced.

    Raises:
        OSError: the file cannot be written.
    """
    _with_retries(lambda: _replace(path, data, durably=False))


def write_durably(path: Path, data: bytes) -> None:
    """As `write`; the file also survives a power failure."""

    def attempt() -> None:
        _replace(path, data, durably=True)
        sync_directory(path.parent)

    _with_retries(attempt)


def open_to_append(path: str | os.PathLike[str]) -> int:
    """Open the file `path` for appending, and return its descriptor.

    A file that does not exist is created; only its owner may read it.

    Raises:
        OSError: the file cannot be written, or it is a symbolic link or a pipe.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "expected a file, but found a pipe", os.fspath(path))
    return descriptor


def move(source: Path, target: Path) -> None:
    """Rename a file or a directory; a file at `target` is replaced.

    Raises:
        OSError: `source` cannot be renamed; `FileNotFoundError` if it does not exist.
    """
    renamed = _with_retries(source.lstat)

    def attempt() -> None:
        try:
            source.rename(target)
        except FileNotFoundError:
            # `target` is what `source` was where an earlier attempt has renamed it, although it reported an error.
            if not os.path.samestat(target.lstat(), renamed):
                raise

    _with_retries(attempt)


def sync_directory(directory: Path) -> None:
    """Make the entries of `directory` durable (fsync). Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished(directory: Path, name: str) -> list[Path]:
    """Temporary files that killed writers of the file `name` have left in `directory`."""
    return list(directory.glob(f".{name}.*.tmp"))


def _replace(path: Path, data: bytes, *, durably: bool) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        temporary.unlink(missing_ok=True)  # a killed process with the same pid and thread may have left this file
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(data)
            if durably:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink()
        raise


def _with_retries(call: Callable[[], T]) -> T:
    for pause in _PAUSES_SECONDS:
        try:
            return call()
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise
        time.sleep(pause)
    return call()
