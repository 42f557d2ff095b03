"""Stack traces of a worker's loading processes, requested by a signal and returned in shared memory."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time

from unisono.system.process import parent_pid

REQUEST = signal.SIGUSR2
_PID_BYTES = 8  # at the beginning of each file
_POLLS, _POLL_SECONDS = 20, 0.005  # a response takes a fraction of the latter


class LoaderStacks:
    """Collects stack traces of `count` processes; construct it before they are forked.

    A process responds even if it is blocked in native code: the interpreter writes the stack of its main thread in a
    signal handler, and continues.
    """

    def __init__(self, count: int) -> None:
        self._files = [os.memfd_create(f"stack of loader {number}") for number in range(count)]

    def register(self, number: int) -> None:
        """Make the calling process, of that number, respond to requests from now on."""
        faulthandler.register(REQUEST, file=self._files[number], all_threads=False)
        os.pwrite(
            self._files[number], os.getpid().to_bytes(_PID_BYTES, "little"), 0
        )  # last: before `register`, the signal would kill it

    def collect(self) -> list[str]:
        """The stacks of processes that respond, innermost line first; for any thread of the constructing process."""
        requested = [file for file in self._files if self._request(file)]
        stacks = ["" for _ in requested]
        for _ in range(_POLLS):
            time.sleep(_POLL_SECONDS)
            latest = [self._read(file) for file in requested]
            if latest == stacks and all(latest):
                break
            stacks = latest
        return [text for text in stacks if text]

    def close(self) -> None:
        """Close the files; no further requests."""
        files, self._files = self._files, []
        for file in files:
            os.close(file)

    @staticmethod
    def _request(file: int) -> bool:
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int.from_bytes(os.pread(file, _PID_BYTES, 0), "little")
            if pid and parent_pid(pid) == os.getpid():  # otherwise it has exited, and its PID may be reused
                os.ftruncate(file, _PID_BYTES)
                os.lseek(file, _PID_BYTES, os.SEEK_SET)  # the offset is shared with the forked process
                os.kill(pid, REQUEST)
                return True
        return False

    @staticmethod
    def _read(file: int) -> str:
        with contextlib.suppress(OSError):
            return os.pread(file, 1 << 16, _PID_BYTES).decode(errors="replace")
        return ""
