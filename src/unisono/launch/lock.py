"""Locks a run's directory, so that only the processes of one command write there.

Every process that writes to the directory holds its file ``lock`` shared (``flock``). The kernel releases a lock when
its process exits, for whatever reason, so a free lock means that no process of the run is left. A command first takes
the lock exclusively, which succeeds only if it is free. It writes its identity to the file, then shares the lock with
its workers.

On NFS, Linux turns such locks into byte-range locks, which exclude processes of other hosts too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from unisono.errors import InvalidInput
from unisono.system import process

LOCK = "lock"  # in the run's directory
_EXIT_SECONDS = 10.0  # how long workers may take to exit after their launcher
_KILLED_SECONDS = 1.0  # how long a command may take to exit after SIGKILL, on a loaded host
_RETRY_SECONDS = 0.05
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_log = logging.getLogger("unisono")


@dataclass(frozen=True)
class Holder:
    """The command that holds the lock of a run's directory.

    Args:
        host: name of its host.
        process: pid of the launcher there; under another launcher, of worker 0.
        since: when the command started, in seconds since 1970.
    """

    host: str
    process: int
    since: float

    @classmethod
    def current(cls) -> Holder:
        """This process, as of now."""
        return cls(os.uname().nodename, os.getpid(), time.time())

    @property
    def has_exited(self) -> bool:
        """Whether the process is known to have exited."""
        return self._is_on_this_host and process.has_exited(self.process)

    @property
    def is_releasing(self) -> bool:
        """Whether the last workers of the command are about to release the lock.

        They are if the command has exited, or if this process itself ran the command earlier.
        """
        return self.has_exited or (self._is_on_this_host and self.process == os.getpid())

    @property
    def _is_on_this_host(self) -> bool:
        return self.host == os.uname().nodename


def make_unique_directory(path: Path, mode: int = 0o777) -> Path:
    """Create the directory `path`, or ``<path>-2``, ``<path>-3``, … if it exists; return the path.

    Raises:
        OSError: the directory cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in itertools.chain([path.name], (f"{path.name}-{n}" for n in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            path.with_name(name).mkdir(mode)
            break
    return path.with_name(name)


@contextlib.contextmanager
def hold_lock(directory: Path, holder: Holder) -> Iterator[None]:
    """Hold the lock of `directory` for the command `holder`, shared with its other processes.

    Waits up to ten seconds for the workers of a command that has exited, and one second for any other holder.

    Raises:
        InvalidInput: another command holds the lock.
        OSError: the directory does not exist, or cannot be written.
    """
    file = _acquire(directory / LOCK, holder)
    try:
        yield
    finally:
        os.close(file)


def _acquire(path: Path, holder: Holder) -> int:
    """Acquire the lock for `holder`; returns the descriptor that holds the lock."""
    began = time.monotonic()
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if _lock(file, holder) and _is_at(file, path):
                return file
            other = _read(file)
            patience = _EXIT_SECONDS if other and other.is_releasing else _KILLED_SECONDS
            if time.monotonic() - began > patience:
                raise _refused(path.parent, other)
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        time.sleep(_RETRY_SECONDS)


def _lock(file: int, holder: Holder) -> bool:
    """Lock `file` shared if the lock is free or `holder` has it; returns whether `file` is locked now."""
    if _read(file) != holder:
        if not _flock(file, fcntl.LOCK_EX):
            return False
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(asdict(holder)).encode(), 0)
    # Another command may have taken the lock between the two calls: then the file names that command.
    return _flock(file, fcntl.LOCK_SH) and _read(file) == holder


def _flock(file: int, operation: int) -> bool:
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _log.warning(
            "this file system has no locks (%s): do not start a second command in the directory", error.strerror
        )
    return True


def _is_at(file: int, path: Path) -> bool:
    """Whether `path` still refers to `file`: a command that is refused removes the directory that it made."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _read(file: int) -> Holder | None:
    """The holder that the file names; None if the file is new or being written."""
    try:
        return Holder(**json.loads(os.pread(file, 4096, 0)))
    except (ValueError, TypeError):
        return None


def _refused(directory: Path, other: Holder | None) -> InvalidInput:
    command = "another command"
    if other:
        workers, exited = ("workers of ", ", which has exited,") if other.has_exited else ("", "")
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(other.since))
        command = f"{workers}process {other.process} on host {other.host}{exited} since {since}"
    return InvalidInput(
        "run_dir",
        str(directory),
        f"it is in use by {command}",
        "wait for that run or end it, or name another directory",
    )
