"""Anonymous memory that processes of one host share.

Worker 0 creates a memory file and publishes its process number and the descriptor; the others open the file through
``/proc``. The kernel frees it when the last process that maps it has exited, even if all are killed.
"""

from __future__ import annotations

import os
import platform
import stat
import sys

import torch
from torch import Tensor

PAGE_BYTES = 4096


class MemoryUnavailable(OSError):
    """Memory cannot be shared on this host; the text has the reason."""


def check_platform() -> None:
    """Raises `MemoryUnavailable` if shared flags are not safe on this platform, or it has no memory files."""
    if sys.platform != "linux":
        raise MemoryUnavailable(f"{sys.platform} has no memory files")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise MemoryUnavailable(f"the order of stores on {platform.machine()} is not strong enough")


def pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages, one at least."""
    return max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES


def create(nbytes: int) -> int:
    """Create a memory file of `nbytes` zeros. Allocates them: too little memory raises `OSError`, not SIGBUS later."""
    fd = os.memfd_create("unisono", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_of(pid: int, number: int, nbytes: int) -> Tensor:
    """Map the file with descriptor `number` of process `pid`. Raises `OSError` unless it is a file of `nbytes`."""
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
            raise MemoryUnavailable(f"/proc/{pid}/fd/{number} is another file")
        # The mapping does not need the descriptor any more, unlike Python's own mmap objects.
        memory = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise MemoryUnavailable(str(error).splitlines()[0]) from error
    finally:
        os.close(fd)
    # The first sum must not pay for the page faults.
    memory[::PAGE_BYTES].sum()
    return memory
