"""Set-up of processes that a worker forks to read its data."""

from __future__ import annotations

import ctypes
import os
import signal

import torch
from setproctitle import getproctitle, setproctitle

_PR_SET_PDEATHSIG = 1


def set_up_child(parent: int, role: str) -> None:
    """Bind this process to the lifetime of the worker `parent`, ignore Ctrl-C and SIGTERM, use one thread."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for request in (signal.SIGINT, signal.SIGTERM):
        signal.signal(request, signal.SIG_IGN)
    torch.set_num_threads(1)  # the threads of the parent's pool do not exist after fork
    setproctitle(f"{getproctitle()} {role}")
