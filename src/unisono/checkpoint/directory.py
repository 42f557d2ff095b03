"""The directory of a run's checkpoints: names, order, and how a checkpoint appears and is removed.

    step-00000100/              a complete checkpoint: manifest.json, part-0.safetensors, part-1...
    LATEST                      has the name of the newest checkpoint; replaced atomically
    .step-00000200.7.tmp/       a checkpoint in progress, by the workers of attempt 7
    .step-00000100.replaced/    the former step-00000100, between the two renames that replace it

A name without a leading dot appears by one rename, after all bytes are on disk: such a checkpoint is complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from unisono.checkpoint.manifest import seal, unseal
from unisono.errors import CheckpointDamaged
from unisono.system import atomic_files as atomic

MANIFEST = "manifest.json"
LATEST = "LATEST"
_STEP = re.compile(r"step-(\d{8,18})")
_REPLACED = re.compile(r"\.(step-\d{8,18})\.replaced")
_LEFTOVER = re.compile(r"\.step-\d{8,18}\..*\.tmp")
JSON_LIMIT = 1 << 28  # bytes; a longer manifest is not read


def step_name(step: int) -> str:
    """The name of the directory of `step`'s checkpoint."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's name; None for any other name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


def temporary(directory: Path, step: int, attempt: str) -> Path:
    """The directory in which the part files of `step` are collected before they are a checkpoint."""
    return directory / f".{step_name(step)}.{attempt}.tmp"


def checkpoints(directory: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Step and path of all checkpoints in `directory`, oldest step first; empty if it does not exist.

    All listed checkpoints are complete; only reading shows whether they are sound.
    """
    found: dict[int, Path] = {}
    for path in _directories(Path(directory)):
        replaced = _REPLACED.fullmatch(path.name)
        step = step_of(replaced[1] if replaced else path.name)
        if step is not None and not (replaced and step in found):
            found[step] = path
    return sorted(found.items())


def _directories(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            # Names without a dot sort after those with one, and must win: see `checkpoints`.
            found = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda path: (path.name.startswith("."), path.name))


def newest_first(steps: Sequence[int], latest: int | None) -> list[int]:
    """The order in which checkpoints are tried: `latest`, then older steps from the newest on, then steps after it.

    Steps after the latest were written before the run rolled back to an earlier step.
    """
    end = latest if latest is not None else max(steps, default=0)
    return sorted(steps, key=lambda step: (step > end, -step))


def read_latest(directory: Path) -> int | None:
    """The step in LATEST; None if there is no LATEST yet.

    Raises:
        CheckpointDamaged: LATEST is damaged, or names a checkpoint that does not exist.
    """
    path = directory / LATEST
    try:
        step = step_of(str(unseal(read_small(path, 4096)).get("checkpoint")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(f"{path}: {error}") from None
    if step is None or step not in dict(checkpoints(directory)):
        raise CheckpointDamaged(f"{path}: the checkpoint that it names does not exist")
    return step


def write_latest(directory: Path, step: int) -> None:
    """Make LATEST name the checkpoint of `step`."""
    atomic.write_durably(directory / LATEST, seal({"checkpoint": step_name(step)}))


def put_in_place(temporary: Path, directory: Path, step: int) -> None:
    """Make the complete directory `temporary` the checkpoint of `step`.

    If there is one already, either it or the new checkpoint can be read at any moment.
    """
    final, replaced = directory / step_name(step), directory / f".{step_name(step)}.replaced"
    if final.exists():
        atomic.move(final, replaced)
    atomic.move(temporary, final)
    atomic.sync_directory(directory)
    remove(replaced)


def prune(directory: Path, latest: int, keep: int) -> None:
    """Remove all checkpoints but the first `keep` in the order of `newest_first`."""
    found = dict(checkpoints(directory))
    for step in newest_first(list(found), latest)[keep:]:
        remove(found[step])


def sweep(directory: Path) -> None:
    """Clean up after an earlier attempt: restore a checkpoint that it was replacing, remove what it was writing."""
    for path in _directories(directory):
        replaced = _REPLACED.fullmatch(path.name)
        if replaced and not (directory / replaced[1]).exists():
            with contextlib.suppress(FileNotFoundError):  # a straggler of that attempt has just done it
                atomic.move(path, directory / replaced[1])
        elif replaced or _LEFTOVER.fullmatch(path.name):
            remove(path)
    for path in atomic.unfinished(directory, LATEST):
        path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a directory if it exists; several processes may do so concurrently.

    It is renamed first, so that no process finds it half removed.
    """
    nameless = path.with_name(f".{path.name.strip('.')}.{secrets.token_hex(4)}.removed.tmp")
    try:
        atomic.move(path, nameless)
    except FileNotFoundError:
        return
    shutil.rmtree(nameless, ignore_errors=True)  # the next sweep removes what remains


def read_small(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        OSError: the file cannot be opened, or is a symbolic link.
        ValueError: the file is longer, or is no regular file.
    """
    descriptor = open_to_read(path)
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > limit:
            raise ValueError(f"longer than {limit} bytes")
        return file.read(limit)


def open_to_read(path: Path) -> int:
    """A descriptor of a regular file; never follows a link or waits for a pipe. Raises OSError or ValueError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("not a regular file")
    return descriptor
