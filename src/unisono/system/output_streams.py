"""Output streams that outlive their reader: a pipe that is closed, a terminal that is gone, a disk that is full.

Output that cannot be written is lost, and the process goes on.
"""

from __future__ import annotations

import errno
import io
import select
from typing import Any, TextIO

_NOT_TAKEN = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ESTALE)


class Unfailing(io.FileIO):
    """A file whose `write` drops what the other end does not take."""

    def write(self, data: Any) -> int:
        """Write all of `data`, waiting for a slow reader, or drop it."""
        try:
            while (count := super().write(data)) is None:  # another process has made the descriptor non-blocking
                select.select([], [self], [])
        except OSError as error:
            if error.errno not in _NOT_TAKEN:
                raise
            return len(data)
        return count


def unfailing(descriptor: int, encoding: str = "utf-8", *, line_buffering: bool = True) -> TextIO:
    """A text stream to `descriptor`, which stays open when the stream is closed."""
    buffer = io.BufferedWriter(Unfailing(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=line_buffering)
