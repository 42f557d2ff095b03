"""Set-up of processes that a worker forks to read its data."""

from __future__ import annotations

import signal

import torch
from setproctitle import getproctitle, setproctitle

from unisono.system.process import exit_with_parent


def set_up_child(parent: int, role: str) -> None:
    """Bind this process to the lifetime of the worker `parent`, ignore Ctrl-C and SIGTERM, use one thread."""
    exit_with_parent(parent)
    for request in (signal.SIGINT, signal.SIGTERM):
        signal.signal(request, signal.SIG_IGN)
    torch.set_num_threads(1)  # the threads of the parent's pool do not exist after fork
    setproctitle(f"{getproctitle()} {role}")
