"""Anonymous memory that processes of one host share.

Worker 0 creates a memory file, and publishes its own process number and the file's descriptor; the other workers open
the file through ``/proc``. The kernel frees the file when the last process that maps it has exited, even if all are
killed.
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
    """Memory cannot be shared on this host; the error's text has the reason."""


def check_platform() -> None:
    """Raises `MemoryUnavailable` if this platform has no memory files, or may reorder the stores of a process."""
    if sys.platform != "linux":
        raise MemoryUnavailable(f"{sys.platform} has no memory files")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise MemoryUnavailable(f"the order of stores on {platform.machine()} is not strong enough")


def pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages, to one page at least."""
    return max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES


def create(nbytes: int) -> int:
    """Create a memory file of `nbytes` zeros; returns its descriptor.

    The memory is allocated now: if there is too little of it, this raises `OSError`, instead of a SIGBUS later.
    """
    fd = os.memfd_create("unisono", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_of(pid: int, number: int, nbytes: int) -> Tensor:
    """Map the file with descriptor `number` of process `pid`. Raises `OSError` unless this is a file of `nbytes`."""
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
            raise MemoryUnavailable(f"/proc/{pid}/fd/{number} is not a file of {nbytes} bytes")
        # Unlike an mmap object of Python, this mapping does not need the descriptor any more.
        memory = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise MemoryUnavailable(str(error).splitlines()[0]) from error
    finally:
        os.close(fd)
    # The first sum must not pay for the page faults.
    memory[::PAGE_BYTES].sum()
    return memory
