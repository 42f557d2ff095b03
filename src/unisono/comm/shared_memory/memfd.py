"""Memory without a name that processes of one host share.

Worker 0 makes a memory file and tells its process number and the file's number there; the others open it
through ``/proc``. The file is gone when the last process that maps it is gone, even if all are killed.
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
    """Memory cannot be shared here; the text says why."""


def check_platform() -> None:
    """Raises `MemoryUnavailable` where shared flags are not safe or memory files do not exist."""
    if sys.platform != "linux":
        raise MemoryUnavailable(f"{sys.platform} has no memory files")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise MemoryUnavailable(f"the order of stores on {platform.machine()} is not strong enough")


def pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages, one at least."""
    return max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES


def create(nbytes: int) -> int:
    """A memory file of `nbytes` zeros, really taken: too little memory is an `OSError` now, not a SIGBUS
    later."""
    fd = os.memfd_create("unisono", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_of(pid: int, number: int, nbytes: int) -> Tensor:
    """The bytes of file `number` of process `pid`, mapped. Raises `OSError` where that is not what it should
    be."""
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
