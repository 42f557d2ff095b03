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
        self._to, self._path = to, path
        self._file = os.open(path, os.O_RDONLY)
        self._at = os.lseek(self._file, 0, os.SEEK_END)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._watch: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._number = self._look_at(path)

    def fileno(self) -> int:
        """Readable when the file has grown."""
        return self._watch

    def turn_to(self, path: Path, at: int) -> None:
        """From now on, of the file `path`, what follows its first `at` bytes; of the one before, all there is."""
        if path == self._path:
            return
        self.attend()
        number = self._look_at(path)
        self._libc.inotify_rm_watch(self._watch, self._number)
        os.close(self._file)
        self._path, self._number, self._at = path, number, at
        self._file = os.open(path, os.O_RDONLY)
        self.attend()

    def _look_at(self, path: Path) -> int:
        number: int = -1
        if self._watch >= 0:
            number = self._libc.inotify_add_watch(self._watch, os.fsencode(path), _IN_MODIFY)
        if number < 0:
            raise OSError(ctypes.get_errno(), "the kernel watches no more files (fs.inotify.max_user_watches)")
        return number

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
