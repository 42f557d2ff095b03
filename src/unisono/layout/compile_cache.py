"""``torch.compile`` with its cache of native code in a directory that no other user can write to."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unisono.errors import InvalidInput

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compiled(function: Callable[..., Any]) -> Any:
    """``torch.compile(function)``, which keeps native code in a directory that only this user can write to.

    The user may choose the directory by ``TORCHINDUCTOR_CACHE_DIR``. torch's own default has a predictable name in the
    temporary directory, so another user could own it.

    Raises:
        InvalidInput: no directory can be made that only this user can write to.
    """
    if not os.environ.get(_VARIABLE):
        os.environ[_VARIABLE] = str(_cache())
    return torch.compile(function)


def _cache() -> Path:
    found = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unisono" / "compiled"
    try:
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = found.lstat()
    except OSError as error:
        raise _error(found, error.strerror or str(error)) from None
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise _error(found, "others can write to it")
    return found


def _error(directory: Path, why: str) -> InvalidInput:
    return InvalidInput(
        "compile", True, f"native code cannot be kept in {directory}: {why}", f"set {_VARIABLE} to a private directory"
    )
