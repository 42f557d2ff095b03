"""Writes the part file of one worker."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from unisono.checkpoint.manifest import PartFile, encode_part, part_file
from unisono.checkpoint.safetensors_format import PAGE
from unisono.checkpoint.staging import Image
from unisono.system.atomic_files import write_durably


class WriteStopped(Exception):
    """The checkpoint was abandoned."""


def report_file(rank: int) -> str:
    """The file whose presence means that the part file of worker `rank` is complete."""
    return f"part-{rank}.json"


def write_part(
    directory: Path,
    rank: int,
    step: int,
    image: Image,
    stopped: Callable[[], bool],
) -> PartFile:
    """Write the part file `image` durably into `directory`, then its report, whose presence marks it as complete.

    Raises:
        OSError: a file cannot be written; the partial file is removed.
        WriteStopped: `stopped` returned true between two chunks; the partial file is removed.
    """
    path, report = directory / part_file(rank), directory / report_file(rank)
    report.unlink(missing_ok=True)
    try:
        _stream(path, image, stopped)
        part = PartFile(image.container.nbytes, image.tensors)
        write_durably(report, encode_part(step, part))
    except (OSError, WriteStopped):
        with contextlib.suppress(OSError):  # raise the first error, not this one
            path.unlink(missing_ok=True)
        raise
    return part


def _stream(path: Path, image: Image, stopped: Callable[[], bool]) -> None:
    nbytes, descriptor = image.container.nbytes, _create(path)
    try:
        # Allocate the space first: a disk that is too full fails before a byte is written.
        os.posix_fallocate(descriptor, 0, -(-nbytes // PAGE) * PAGE)
        for chunk in image.chunks():
            if stopped():
                raise WriteStopped
            _write_all(descriptor, chunk)
        os.ftruncate(descriptor, nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(path: Path) -> int:
    """A new private file that bypasses the page cache, where the file system supports that.

    So there is no second copy in memory, and data that training reads from disk stays in the cache.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except OSError as error:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            direct = flags & getattr(os, "O_DIRECT", 0)
            if error.errno != errno.EINVAL or not direct:
                raise
            # The file system requires another alignment; through the page cache it accepts any.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~direct)
