"""Where a run lies: ``config.toml``, ``events.jsonl``, ``summary.json``, ``logs/`` and ``checkpoints/`` in a directory of its own."""

from __future__ import annotations

import contextlib
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from unisono.config import Config
from unisono.errors import InvalidInput


@contextlib.contextmanager
def claimed(config: Config, name: str) -> Iterator[Path]:
    """The run's directory, made if it is new. Invalid input inside takes a new directory away again.

    Raises:
        InvalidInput: the directory is there and nobody said resume, or is not there and somebody did.
    """
    path = Path(config.run).absolute() if config.run else _fresh(name)
    new = not path.exists()
    if config.resume and not config.run:
        raise InvalidInput("resume", True, "which run is not said", "add --run DIR")
    if config.resume and new:
        raise InvalidInput("run", str(path), "there is no such run to resume", "leave out --resume to start it")
    if not new and not config.resume and any(path.iterdir()):
        raise InvalidInput("run", str(path), "the directory exists", "add --resume to go on with it, or name another")
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "logs").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise InvalidInput("run", str(path), f"cannot be made ({error.strerror})", "name another directory") from None
    try:
        yield path
    except InvalidInput:
        if new:
            shutil.rmtree(path, ignore_errors=True)
        raise


def with_earlier(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Under what is given for a run that is resumed, what its earlier life was given.

    Raises:
        InvalidInput: the run's ``config.toml`` cannot be read.
    """
    if str(settings.get("resume", False)).lower() != "true" or not settings.get("run"):
        return settings
    file = Path(settings["run"]) / "config.toml"
    if not file.exists():
        return settings
    try:
        earlier = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput("resume", str(file), f"cannot be read ({error})", "mend it, or take it away") from None
    earlier.pop("task", None)
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if settings.get(one) is not None:
            earlier.pop(other, None)
    return {**earlier, **{name: value for name, value in settings.items() if value is not None}}


def _fresh(name: str) -> Path:
    stem = "".join(c if c.isalnum() or c in "-_." else "-" for c in name.rsplit("/", 1)[-1])
    base = Path("runs").absolute() / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    path, n = base, 2
    while path.exists():
        path, n = base.with_name(f"{base.name}-{n}"), n + 1
    return path
