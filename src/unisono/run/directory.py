"""Where a run lies: ``config.toml``, ``events.jsonl``, ``summary.json``, ``logs/``, ``checkpoints/`` side by side."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from unisono.checkpoint.directory import checkpoints, sweep
from unisono.config import Config
from unisono.errors import InvalidInput
from unisono.launch.lock import LOCK, Holder, hold_lock, make_unique_directory
from unisono.membership.contact_file import remove_contact
from unisono.notation import current_names
from unisono.observe import write_config
from unisono.observe.record_files import CONFIG, SUMMARY
from unisono.run.spec import TaskSource
from unisono.system.atomic_files import unfinished
from unisono.trainer.loop_checkpoint import MARKER

CHECKPOINTS = "checkpoints"


@contextlib.contextmanager
def claimed(config: Config, source: TaskSource, holder: Holder) -> Iterator[Path]:
    """The run's directory, locked for `holder`, with its configuration if it is new. Invalid input inside takes a new
    run away again, unless it has a checkpoint.

    A directory holds a run as soon as ``config.toml`` is in it: until then it can be started, from then on resumed.

    Raises:
        InvalidInput: the run is there and nobody said resume, or is not there and somebody did; another command holds
            the directory; or it cannot be made.
    """
    if config.resume and not config.run_dir:
        raise InvalidInput("resume", True, "which run is not said", "add --run-dir DIR")
    path, missing = _chosen(config, source)
    _check(path, config)
    try:
        with _locked(path, holder):
            _check(path, config)  # another command may have had it until now
            begun = _begun(path)
            try:
                _make(path, config, source, begun)
                yield path
            except InvalidInput:
                if not (begun or checkpoints(path / CHECKPOINTS)):
                    _empty(path)
                raise
    except InvalidInput:
        with contextlib.suppress(OSError):  # what is in there is not this command's
            for place in missing:
                place.rmdir()
        raise


@contextlib.contextmanager
def resumable(path: Path) -> Iterator[None]:
    """Have errors that leave the run in `path` as it is say how to go on with it, in a note."""
    try:
        yield
    except InvalidInput:
        raise
    except Exception as error:
        error.add_note(f"the run directory is {path}; resume with Config(run_dir={str(path)!r}, resume=True)")
        raise


def _chosen(config: Config, source: TaskSource) -> tuple[Path, list[Path]]:
    """The run's directory, made where the user does not name it; and which of it and its parents were not there."""
    path = Path(config.run_dir).absolute() if config.run_dir else _default(source.name)
    missing = [place for place in (path, *path.parents) if not place.exists()]
    if config.run_dir:
        return path, missing
    with _written(path):
        path = make_unique_directory(path)
    return path, [path, *missing[1:]]


def _check(path: Path, config: Config) -> None:
    """Raise `InvalidInput` if there is no run to resume in `path`, or one where a new one is to begin."""
    if config.resume and not _begun(path):
        raise InvalidInput("run_dir", str(path), "there is no such run to resume", "leave out --resume to start it")
    if not config.resume and not _is_free(path):
        raise InvalidInput(
            "run_dir", str(path), "the directory exists", "add --resume to go on with it, or name another"
        )


@contextlib.contextmanager
def _locked(path: Path, holder: Holder) -> Iterator[None]:
    """Hold the lock of `path`, which is made if it is not there. Raises `InvalidInput`."""
    with contextlib.ExitStack() as stack:
        with _written(path):
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(hold_lock(path, holder))
        yield


def _make(path: Path, config: Config, source: TaskSource, begun: bool) -> None:
    with _written(path):
        _clear(path)
        (path / "logs").mkdir(mode=0o700, exist_ok=True)
        if not begun:
            write_config(path, config.mapping(), source.absolute(), source.arguments)
        with tempfile.TemporaryFile(dir=path):
            pass  # the user who resumes a run may not be the one who may write here


def _clear(path: Path) -> None:
    """Remove what processes of an earlier life have left that were killed: no other process writes there now."""
    remove_contact(path)
    sweep(path / CHECKPOINTS)
    for left in chain(*(unfinished(path, name) for name in (CONFIG, SUMMARY)), path.glob(MARKER.format("*"))):
        left.unlink(missing_ok=True)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """Turn a refusal of the file system into `InvalidInput`."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(
            "run_dir", str(path), f"cannot be written ({error.strerror})", "name another directory"
        ) from None


def _begun(path: Path) -> bool:
    """Whether there is a run in `path`."""
    return (path / CONFIG).exists() or (path / CHECKPOINTS).exists()


def _is_free(path: Path) -> bool:
    """Whether a run may begin in `path`: nothing is there, or what a start leaves that was killed right away."""
    if not path.is_dir():
        return not path.exists()
    logs = path / "logs"
    foreign = [p for p in path.iterdir() if p.name not in (LOCK, logs.name) and not p.name.startswith(f".{CONFIG}.")]
    return not foreign and not (logs.exists() and any(logs.iterdir()))


def _empty(path: Path) -> None:
    """Remove the run in `path`."""
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def with_earlier(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Under what is given for a run that is resumed, what its earlier life was given.

    Raises:
        InvalidInput: the run's ``config.toml`` cannot be read.
    """
    if str(settings.get("resume", False)).lower() != "true" or not settings.get("run_dir"):
        return settings
    file = Path(settings["run_dir"]) / CONFIG
    if not file.exists():
        return settings
    try:
        earlier = current_names(tomllib.loads(file.read_text()))
    except InvalidInput:
        raise
    except (OSError, ValueError) as error:
        raise InvalidInput("resume", str(file), f"cannot be read ({error})", "mend it, or take it away") from None
    earlier.pop("task", None)
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if settings.get(one) is not None:
            earlier.pop(other, None)
    return {**earlier, **settings}


def _default(name: str) -> Path:
    stem = "".join(c if c.isalnum() or c in "-_." else "-" for c in name.rsplit("/", 1)[-1])
    return Path("runs").absolute() / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
