"""Which host this is."""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from pathlib import Path


def host_name() -> str:
    """A name that only those processes have in common that share memory and loopback: of one boot of one kernel, with
    the same network and processes, and of one user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user")]
    except OSError:  # nor is there memory to share
        boot, spaces = f"{uuid.getnode()}", [socket.gethostname()]
    return hashlib.sha256("\n".join([boot, *spaces, str(os.getuid())]).encode()).hexdigest()[:16]
