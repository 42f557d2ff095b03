"""Imported by a fork server: it forks three workers, and goes no further with the third one."""

from __future__ import annotations

import itertools
import os
import threading

_SERVER, _LAST = os.getpid(), 3
_count, _waitpid = itertools.count(1), os.waitpid


def _wait(pid: int, options: int) -> tuple[int, int]:
    if os.getpid() == _SERVER and next(_count) == _LAST:
        threading.Event().wait()
    return _waitpid(pid, options)


os.waitpid = _wait
