"""Detects when processes of the other workers of this host exit."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping

from unisono.system.process import has_exited


class PeerProcesses:
    """Watches processes of this host, whose numbers are given by rank; a zombie counts as exited.

    Where the kernel has process descriptors, they are used: they stay valid when a process number is reused. Elsewhere,
    and for processes that cannot be opened, the number and the state of the process are checked.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._exited: set[int] = set()
        self._lock = threading.Lock()  # channels may be used by different threads
        for rank, pid in pids.items():
            self._watch(rank, pid)

    def lost(self) -> frozenset[int]:
        """The ranks whose process has exited."""
        with self._lock:
            for fd, _ in self._poll.poll(0) if self._ranks else ():
                self._exited.add(self._ranks[fd])
                self._poll.unregister(fd)
            self._exited.update(rank for rank, pid in self._pids.items() if has_exited(pid))
            return frozenset(self._exited)

    def close(self) -> None:
        with self._lock:
            for fd in self._ranks:
                os.close(fd)
            self._ranks, self._poll = {}, select.poll()

    def _watch(self, rank: int, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._exited.add(rank)
        except (AttributeError, OSError):
            self._pids[rank] = pid
        else:
            self._ranks[fd] = rank
            self._poll.register(fd, select.POLLIN)
