"""Where the loading processes of a worker are in their code: asked by a signal, answered into memory."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path

ASK = signal.SIGUSR2
_PID_BYTES = 8  # at the beginning of each process's memory
_LOOKS, _LOOK_SECONDS = 20, 0.005  # an answer takes a fraction of the second


class LoaderStacks:
    """Of `count` processes; made before they are forked.

    A process answers whatever it does, even if it is blocked in native code: the interpreter writes the lines of its
    main thread in a signal handler, and goes on.
    """

    def __init__(self, count: int) -> None:
        self._files = [os.memfd_create(f"stack of loader {number}") for number in range(count)]

    def register(self, number: int) -> None:
        """Called in the process of that number: from now on it can be asked."""
        faulthandler.register(ASK, file=self._files[number], all_threads=False)
        os.pwrite(self._files[number], os.getpid().to_bytes(_PID_BYTES, "little"), 0)  # not before: it would die of it

    def collect(self) -> list[str]:
        """What each process that answers says, innermost line first; for any thread of the process that made this."""
        asked = [file for file in self._files if self._ask(file)]
        found = ["" for _ in asked]
        for _ in range(_LOOKS):
            time.sleep(_LOOK_SECONDS)
            now = [self._read(file) for file in asked]
            if now == found and all(now):
                break
            found = now
        return [text for text in found if text]

    def close(self) -> None:
        """Nobody asks any more."""
        files, self._files = self._files, []
        for file in files:
            os.close(file)

    @staticmethod
    def _ask(file: int) -> bool:
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int.from_bytes(os.pread(file, _PID_BYTES, 0), "little")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if pid and parent == os.getpid():  # else it has ended, and another may have its number
                os.ftruncate(file, _PID_BYTES)
                os.lseek(file, _PID_BYTES, os.SEEK_SET)  # of both: the process has inherited it
                os.kill(pid, ASK)
                return True
        return False

    @staticmethod
    def _read(file: int) -> str:
        with contextlib.suppress(OSError):
            return os.pread(file, 1 << 16, _PID_BYTES).decode(errors="replace")
        return ""
