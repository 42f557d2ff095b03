"""The token that all who take part in a run have in common: in the environment or a file, where ``ps`` shows none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from unisono.errors import InvalidInput

VARIABLE = "UNISONO_TOKEN"
_SHORTEST = 16


def token(options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> str:
    """What the file of ``--token-file`` or the environment holds; empty where there is neither.

    Raises:
        InvalidInput: the file cannot be read, or what is there is too short or cannot be said.
    """
    name, found = VARIABLE, environ.get(VARIABLE, "").strip()
    if path := options.get("--token-file"):
        try:
            name, found = "--token-file", Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput("--token-file", path, f"cannot be read ({error})", "check the file") from None
        if not found:
            raise InvalidInput("--token-file", path, "nothing is in it", "put the run's token there")
    if found and (len(found) < _SHORTEST or not (found.isascii() and found.isprintable())):
        raise InvalidInput(
            name,
            "(not shown)",
            f"a token has {_SHORTEST} printable characters or more",
            "take one that is harder to guess",
        )
    return found
