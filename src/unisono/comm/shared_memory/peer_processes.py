"""Whether the other workers of this host still live."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping

from unisono.system.process import has_exited


class PeerProcesses:
    """Watches processes of this host by rank; a zombie counts as dead.

    Where the kernel has them, process descriptors are used: they cannot be confused by a number that was
    given to another process. Elsewhere, and for a process that cannot be opened, its number and state are
    looked up.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._dead: set[int] = set()
        self._lock = threading.Lock()  # lanes may be used by threads of their own
        for rank, pid in pids.items():
            self._watch(rank, pid)

    def lost(self) -> frozenset[int]:
        """The ranks whose process is gone, now and from now on."""
        with self._lock:
            for fd, _ in self._poll.poll(0) if self._ranks else ():
                self._dead.add(self._ranks[fd])
                self._poll.unregister(fd)
            self._dead.update(rank for rank, pid in self._pids.items() if has_exited(pid))
            return frozenset(self._dead)

    def close(self) -> None:
        with self._lock:
            for fd in self._ranks:
                os.close(fd)
            self._ranks, self._poll = {}, select.poll()

    def _watch(self, rank: int, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._dead.add(rank)
        except (AttributeError, OSError):
            self._pids[rank] = pid
        else:
            self._ranks[fd] = rank
            self._poll.register(fd, select.POLLIN)
