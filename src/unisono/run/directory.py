"""The directory of a run: ``config.toml``, ``events.jsonl``, ``summary.json``, ``logs/`` and ``checkpoints/``."""

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
def claim_run_directory(config: Config, source: TaskSource, holder: Holder) -> Iterator[Path]:
    """A context that holds the lock of the run's directory for `holder`; a new run's directory is made and configured.

    A directory contains a run as soon as it contains ``config.toml``: until then the run can be started, from then on
    resumed. If the context ends with `InvalidInput`, a new run is removed, unless it has a checkpoint.

    Raises:
        InvalidInput: the run exists and `config.resume` is not set, or does not exist and it is; another command has
            locked the directory; or the directory cannot be written.
    """
    if config.resume and not config.run_dir:
        raise InvalidInput("resume", True, "no run is named", "add --run-dir DIR")
    path, missing = _chosen(config, source)
    _check(path, config)
    try:
        with _locked(path, holder):
            _check(path, config)  # another command may have held the lock until now
            exists = _has_run(path)
            try:
                _prepare(path, config, source, exists)
                yield path
            except InvalidInput:
                if not (exists or checkpoints(path / CHECKPOINTS)):
                    _empty(path)
                raise
    except InvalidInput:
        with contextlib.suppress(OSError):  # a directory with files of another command stays
            for parent in missing:
                parent.rmdir()
        raise


@contextlib.contextmanager
def resumable(path: Path) -> Iterator[None]:
    """A context that adds a note to errors after which the run in `path` can be resumed; the note says how."""
    try:
        yield
    except InvalidInput:
        raise
    except Exception as error:
        error.add_note(f"the run directory is {path}; resume with Config(run_dir={str(path)!r}, resume=True)")
        raise


def _chosen(config: Config, source: TaskSource) -> tuple[Path, list[Path]]:
    """The run's directory, made now if the user does not name one; and which directories of its path did not exist."""
    path = Path(config.run_dir).absolute() if config.run_dir else _default(source.name)
    missing = [each for each in (path, *path.parents) if not each.exists()]
    if config.run_dir:
        return path, missing
    with _translate_errors(path):
        path = make_unique_directory(path)
    return path, [path, *missing[1:]]


def _check(path: Path, config: Config) -> None:
    """Raise `InvalidInput` if `path` has no run to resume, or is not free for a new one."""
    if config.resume and not _has_run(path):
        raise InvalidInput("run_dir", str(path), "there is no such run to resume", "leave out --resume to start it")
    if not config.resume and not _is_free(path):
        raise InvalidInput(
            "run_dir", str(path), "the directory exists", "add --resume to continue the run, or name another"
        )


@contextlib.contextmanager
def _locked(path: Path, holder: Holder) -> Iterator[None]:
    """Make `path` if it does not exist, and hold its lock. Raises `InvalidInput`."""
    with contextlib.ExitStack() as stack:
        with _translate_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(hold_lock(path, holder))
        yield


def _prepare(path: Path, config: Config, source: TaskSource, exists: bool) -> None:
    """Remove unfinished files, and make what a run needs. Raises `InvalidInput`."""
    with _translate_errors(path):
        _clear(path)
        (path / "logs").mkdir(mode=0o700, exist_ok=True)
        if not exists:
            write_config(path, config.mapping(), source.absolute(), source.arguments)
        with tempfile.TemporaryFile(dir=path):
            pass  # fails if the user who resumes the run may not write here


def _clear(path: Path) -> None:
    """Remove unfinished files of killed processes of earlier attempts. The lock excludes other writers."""
    remove_contact(path)
    sweep(path / CHECKPOINTS)
    for left in chain(*(unfinished(path, name) for name in (CONFIG, SUMMARY)), path.glob(MARKER.format("*"))):
        left.unlink(missing_ok=True)


@contextlib.contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    """A context that translates `OSError` into `InvalidInput`."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(
            "run_dir", str(path), f"cannot be written ({error.strerror})", "name another directory"
        ) from None


def _has_run(path: Path) -> bool:
    """Whether `path` contains a run."""
    return (path / CONFIG).exists() or (path / CHECKPOINTS).exists()


def _is_free(path: Path) -> bool:
    """Whether a run may start in `path`: it is empty, or has only what a start that was killed early leaves."""
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


def with_previous_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """`settings`, completed from the ``config.toml`` of the run if they resume one; `settings` take precedence.

    Raises:
        InvalidInput: the run's ``config.toml`` cannot be read.
    """
    if str(settings.get("resume", False)).lower() != "true" or not settings.get("run_dir"):
        return settings
    file = Path(settings["run_dir"]) / CONFIG
    if not file.exists():
        return settings
    try:
        previous = current_names(tomllib.loads(file.read_text()))
    except InvalidInput:
        raise
    except (OSError, ValueError) as error:
        raise InvalidInput("resume", str(file), f"cannot be read ({error})", "repair it, or remove it") from None
    previous.pop("task", None)
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if settings.get(one) is not None:
            previous.pop(other, None)
    return {**previous, **settings}


def _default(name: str) -> Path:
    """A directory in ``runs``, named after the task and the time."""
    stem = "".join(c if c.isalnum() or c in "-_." else "-" for c in name.rsplit("/", 1)[-1])
    return Path("runs").absolute() / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
