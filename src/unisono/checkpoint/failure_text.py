"""Why a checkpoint could not be written, as text."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

_TOO_SMALL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reason(error: BaseException, directory: Path, needed_bytes: int) -> str:
    """One clause: the system's error, the path, and, if space is lacking, the bytes needed and free."""
    if not isinstance(error, OSError) or error.errno is None:
        return f"{type(error).__name__}: {error}"
    message = os.strerror(error.errno)
    where = str(error.filename or directory)
    if error.errno in _TOO_SMALL and needed_bytes:
        where = f"{directory}, {_size(needed_bytes)} needed, {_size(_free(directory))} free"
    return f"{message[0].lower()}{message[1:]} ({where})"


def _free(directory: Path) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} bytes"
