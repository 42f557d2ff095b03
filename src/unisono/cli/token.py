"""Reads a run's token from the environment or a file; options are visible in ``ps``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from unisono.errors import InvalidInput

VARIABLE = "UNISONO_TOKEN"
_MIN_LENGTH = 16


def read_token(options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> str:
    """The token in the file of ``--token-file``, or in the environment; empty if neither is given.

    Raises:
        InvalidInput: the file cannot be read, or the token is too short or has unprintable characters.
    """
    name, token = VARIABLE, environ.get(VARIABLE, "").strip()
    if path := options.get("--token-file"):
        try:
            name, token = "--token-file", Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput("--token-file", path, f"cannot be read ({error})", "check the file") from None
        if not token:
            raise InvalidInput("--token-file", path, "the file is empty", "write the run's token to it")
    if token and (len(token) < _MIN_LENGTH or not (token.isascii() and token.isprintable())):
        problem = f"a token has at least {_MIN_LENGTH} printable ASCII characters"
        raise InvalidInput(name, "(not shown)", problem, "choose one that is harder to guess")
    return token
