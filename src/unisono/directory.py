"""Where a run lies: ``config.toml``, ``events.jsonl``, ``summary.json``, ``logs/``, ``checkpoints/`` side by side."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from unisono.config import Config
from unisono.errors import InvalidInput
from unisono.observe import write_config
from unisono.observe.written import CONFIG
from unisono.order import TaskSource


@contextlib.contextmanager
def claimed(config: Config, source: TaskSource) -> Iterator[Path]:
    """The run's directory, with its configuration if it is new. Invalid input inside takes a new run away again.

    A directory holds a run as soon as ``config.toml`` is in it: until then it can be started, from then on resumed.

    Raises:
        InvalidInput: the run is there and nobody said resume, or is not there and somebody did; or it cannot be made.
    """
    if config.resume and not config.run:
        raise InvalidInput("resume", True, "which run is not said", "add --run DIR")
    path = Path(config.run).absolute() if config.run else _fresh(source.name)
    begun = (path / CONFIG).exists() or (path / "checkpoints").exists()
    if config.resume and not begun:
        raise InvalidInput("run", str(path), "there is no such run to resume", "leave out --resume to start it")
    if not config.resume and not _is_free(path):
        raise InvalidInput("run", str(path), "the directory exists", "add --resume to go on with it, or name another")
    missing = [place for place in (path, *path.parents) if not place.exists()]
    try:
        _make(path, config, source, begun)
        yield path
    except InvalidInput:
        if not begun:
            _take_away(path, missing)
        raise


def _make(path: Path, config: Config, source: TaskSource, begun: bool) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "logs").mkdir(mode=0o700, exist_ok=True)
        if not begun:
            write_config(path, config.mapping(), source.absolute(), source.arguments)
        with tempfile.TemporaryFile(dir=path):
            pass  # whoever resumes may not be who may write here
    except OSError as error:
        raise InvalidInput(
            "run", str(path), f"cannot be written ({error.strerror})", "name another directory"
        ) from None


def _is_free(path: Path) -> bool:
    """Whether a run may begin in `path`: nothing is there, or what a start leaves that was killed right away."""
    if not path.is_dir():
        return not path.exists()
    logs = path / "logs"
    foreign = [p for p in path.iterdir() if p != logs and not p.name.startswith(f".{CONFIG}.")]
    return not foreign and not (logs.exists() and any(logs.iterdir()))


def _take_away(path: Path, missing: Sequence[Path]) -> None:
    """Remove the run in `path`, and those directories that were made for it."""
    for entry in path.iterdir() if path.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody else has put something there meanwhile
        for place in missing:
            place.rmdir()


def with_earlier(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Under what is given for a run that is resumed, what its earlier life was given.

    Raises:
        InvalidInput: the run's ``config.toml`` cannot be read.
    """
    if str(settings.get("resume", False)).lower() != "true" or not settings.get("run"):
        return settings
    file = Path(settings["run"]) / CONFIG
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
    return {**earlier, **settings}


def _fresh(name: str) -> Path:
    stem = "".join(c if c.isalnum() or c in "-_." else "-" for c in name.rsplit("/", 1)[-1])
    base = Path("runs").absolute() / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    path, n = base, 2
    while path.exists():
        path, n = base.with_name(f"{base.name}-{n}"), n + 1
    return path
