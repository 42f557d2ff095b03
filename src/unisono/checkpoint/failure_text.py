"""Why a checkpoint could not be written, for a person."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

_TOO_SMALL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reason(error: BaseException, directory: Path, needed_bytes: int) -> str:
    """One clause: what the system said, where, and for a lack of space how much was needed and how much is
    free."""
    if not isinstance(error, OSError) or error.errno is None:
        return f"{type(error).__name__}: {error}"
    said = os.strerror(error.errno)
    where = str(error.filename or directory)
    if error.errno in _TOO_SMALL and needed_bytes:
        where = f"{directory}, {_size(needed_bytes)} needed, {_size(_free(directory))} free"
    return f"{said[0].lower()}{said[1:]} ({where})"


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
