"""One worker's file on its way to the disk."""

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
    """Nobody wants this part any more."""


def report_file(rank: int) -> str:
    """The file by whose presence worker `rank` says that its part is complete."""
    return f"part-{rank}.json"


def write_part(
    directory: Path,
    rank: int,
    step: int,
    image: Image,
    stopped: Callable[[], bool],
) -> PartFile:
    """Write the file image durably into `directory`, then its report, whose presence says that the part is
    complete.

    Raises:
        OSError: the disk does not take it; what was written of it is removed.
        Stopped: `stopped` said so between two chunks; likewise.
    """
    path, report = directory / part_file(rank), directory / report_file(rank)
    report.unlink(missing_ok=True)
    try:
        _stream(path, image, stopped)
        part = PartFile(image.container.nbytes, image.tensors)
        write_durably(report, encode_part(step, part))
    except (OSError, WriteStopped):
        with contextlib.suppress(OSError):  # the first error is the one that tells
            path.unlink(missing_ok=True)
        raise
    return part


def _stream(path: Path, image: Image, stopped: Callable[[], bool]) -> None:
    nbytes, descriptor = image.container.nbytes, _create(path)
    try:
        # Space is taken first: a disk that is too full says so before a byte is written.
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
    """A new private file that bypasses the page cache, where the file system can: no second copy of the data
    in memory, and what training reads from disk is not driven out of the cache."""
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
            # This file system wants another alignment; through the page cache it takes any.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~direct)
