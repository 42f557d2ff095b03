"""Copies a log file while it grows; the kernel reports that it has grown (inotify), so nothing is polled."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import BinaryIO

_IN_MODIFY = 0x2
_CHUNK_BYTES = 1 << 16


class LogTail:
    """Copies what is appended to a file from now on; a context manager.

    Args:
        path: an existing file.
        to: the stream that receives the copy.
    """

    def __init__(self, path: Path, to: BinaryIO) -> None:
        self._to, self._path = to, path
        self._file = os.open(path, os.O_RDONLY)
        self._offset = os.lseek(self._file, 0, os.SEEK_END)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._inotify: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watch_id = self._add_watch(path)

    def fileno(self) -> int:
        """Descriptor that is readable when the file has grown."""
        return self._inotify

    def switch_to(self, path: Path, offset: int) -> None:
        """Copy the rest of the current file, then `path` from byte `offset` on."""
        if path == self._path:
            return
        self.on_readable()
        watch_id = self._add_watch(path)
        self._libc.inotify_rm_watch(self._inotify, self._watch_id)
        os.close(self._file)
        self._path, self._watch_id, self._offset = path, watch_id, offset
        self._file = os.open(path, os.O_RDONLY)
        self.on_readable()

    def _add_watch(self, path: Path) -> int:
        watch_id: int = -1
        if self._inotify >= 0:
            watch_id = self._libc.inotify_add_watch(self._inotify, os.fsencode(path), _IN_MODIFY)
        if watch_id < 0:
            raise OSError(ctypes.get_errno(), "the kernel watches no more files (fs.inotify.max_user_watches)")
        return watch_id

    def on_readable(self) -> None:
        """Copy what was appended since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._inotify, _CHUNK_BYTES)
        while chunk := os.pread(self._file, _CHUNK_BYTES, self._offset):
            self._offset += len(chunk)
            self._to.write(chunk)
        self._to.flush()

    def __enter__(self) -> LogTail:
        return self

    def __exit__(self, *_: object) -> None:
        self.on_readable()
        os.close(self._file)
        os.close(self._inotify)
