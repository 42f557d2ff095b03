"""A file that grows, shown while it grows; the kernel says when (inotify), so that nobody looks in vain."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import BinaryIO

_IN_MODIFY = 0x2
_PIECE = 1 << 16  # bytes


class Tail:
    """Copies what is appended to a file from now on. A context.

    Args:
        path: of the file, which exists.
        to: where the copy goes.
    """

    def __init__(self, path: Path, to: BinaryIO) -> None:
        self._to = to
        self._file = os.open(path, os.O_RDONLY)
        self._at = os.lseek(self._file, 0, os.SEEK_END)
        libc = ctypes.CDLL(None, use_errno=True)
        self._watch: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._watch < 0 or libc.inotify_add_watch(self._watch, os.fsencode(path), _IN_MODIFY) < 0:
            raise OSError(ctypes.get_errno(), "the kernel watches no more files (fs.inotify.max_user_watches)")

    def fileno(self) -> int:
        """Readable when the file has grown."""
        return self._watch

    def attend(self) -> None:
        """Copy what has come since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._watch, _PIECE)
        while piece := os.pread(self._file, _PIECE, self._at):
            self._at += len(piece)
            self._to.write(piece)
        self._to.flush()

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *_: object) -> None:
        self.attend()
        os.close(self._file)
        os.close(self._watch)
