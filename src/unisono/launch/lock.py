"""The lock on a run's directory: the processes of one command at a time write there.

Every process that writes into the directory holds its file ``lock`` shared (``flock``). The kernel releases a lock when
its process ends, however it ends, so a free lock means that no process of the run is left. A command takes the lock
exclusively before it shares it with its workers, which succeeds only if it is free, and writes down who it is.

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
from unisono.launch import process

LOCK = "lock"  # in the run's directory
_ENDING_SECONDS = 10.0  # that workers may take to follow their launcher into its end
_AGAIN_SECONDS = 0.05
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_log = logging.getLogger("unisono")


@dataclass(frozen=True)
class Holder:
    """The command that a run's directory belongs to.

    Args:
        host: its name.
        process: number of the launcher's process there; under another launcher, of worker 0's.
        since: seconds since 1970.
    """

    host: str
    process: int
    since: float

    @classmethod
    def here(cls) -> Holder:
        """This process, from now on."""
        return cls(os.uname().nodename, os.getpid(), time.time())

    @property
    def ended(self) -> bool:
        """Whether the process is known to have ended."""
        return self._is_here and process.has_ended(self.process)

    @property
    def leaves(self) -> bool:
        """Whether the command has ended, or was an earlier one of this process, so that its last workers are about to
        release the lock."""
        return self.ended or (self._is_here and self.process == os.getpid())

    @property
    def _is_here(self) -> bool:
        return self.host == os.uname().nodename


def fresh(path: Path, mode: int = 0o777) -> Path:
    """Make the directory `path`, or one with a number added to its name where that is taken; return it.

    Raises:
        OSError: nothing can be made there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in itertools.chain([path.name], (f"{path.name}-{n}" for n in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            path.with_name(name).mkdir(mode)
            break
    return path.with_name(name)


@contextlib.contextmanager
def held(directory: Path, holder: Holder) -> Iterator[None]:
    """Hold the lock of `directory` for the command `holder`, beside other processes of the same command.

    Waits for some seconds for the workers of a command that has ended.

    Raises:
        InvalidInput: another command holds it.
        OSError: the directory is not there, or cannot be written.
    """
    file = _locked(directory / LOCK, holder)
    try:
        yield
    finally:
        os.close(file)


def _locked(path: Path, holder: Holder) -> int:
    """A descriptor that holds the lock."""
    end = time.monotonic() + _ENDING_SECONDS
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if _lock(file, holder) and _is_at(file, path):
                return file
            other = _read(file)
            if not (other and other.leaves and time.monotonic() < end):
                raise _refused(path.parent, other)
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        time.sleep(_AGAIN_SECONDS)


def _lock(file: int, holder: Holder) -> bool:
    """Lock `file` shared, if it is free or belongs to `holder` already."""
    if _read(file) != holder:
        if not _flock(file, fcntl.LOCK_EX):
            return False
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(asdict(holder)).encode(), 0)
    # Another command may have taken the lock between the two calls: then it is the one that is written down.
    return _flock(file, fcntl.LOCK_SH) and _read(file) == holder


def _flock(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _log.warning("this file system has no locks (%s): start no second command in the directory", error.strerror)
    return True


def _is_at(file: int, path: Path) -> bool:
    """Whether `path` still leads to `file`: a command that is refused removes the directory that it made."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _read(file: int) -> Holder | None:
    """Whom the file names; None for a new one, or one that is being written."""
    try:
        return Holder(**json.loads(os.pread(file, 4096, 0)))
    except (ValueError, TypeError):
        return None


def _refused(directory: Path, other: Holder | None) -> InvalidInput:
    who = "another command"
    if other:
        workers, ended = ("workers of ", ", which has ended,") if other.ended else ("", "")
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(other.since))
        who = f"{workers}process {other.process} on host {other.host}{ended} since {since}"
    return InvalidInput(
        "run_dir", str(directory), f"it is in use by {who}", "wait for that run or end it, or name another directory"
    )
