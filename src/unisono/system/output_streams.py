"""Output streams that raise no error when a pipe or terminal is closed, or a disk is full.

Output that cannot be written is lost, and the process continues.
"""

from __future__ import annotations

import errno
import io
import select
from typing import Any, TextIO

_IGNORED_ERRORS = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ESTALE)


class Unfailing(io.FileIO):
    """A file whose `write` discards data that cannot be written."""

    def write(self, data: Any) -> int:
        """Write all of `data`, waiting for a slow reader, or discard it."""
        try:
            while (count := super().write(data)) is None:  # another process has made the descriptor non-blocking
                select.select([], [self], [])
        except OSError as error:
            if error.errno not in _IGNORED_ERRORS:
                raise
            return len(data)
        return count


def unfailing(descriptor: int, encoding: str = "utf-8", *, line_buffering: bool = True) -> TextIO:
    """A text stream to `descriptor`, which stays open when the stream is closed; see `Unfailing`."""
    buffer = io.BufferedWriter(Unfailing(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=line_buffering)
