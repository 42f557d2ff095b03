"""A rendezvous store for the workers of one host, whose keys are files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch._C import _distributed_c10d as c10d
from torch.distributed import DistStoreError

from unisono.comm.abort import Abort
from unisono.comm.rendezvous.store_exchange import await_keys
from unisono.system import atomic_files


class DirectoryStore(c10d.Store):
    """A store in a private `directory`; each key is a file, which is written atomically.

    torch's own FileStore is one file with a lock. If a process is stopped while it holds the lock, or is killed within
    a record, all other processes wait inside torch with the GIL held, and cannot be aborted.

    Args:
        timeout_seconds: how long to wait for a key.
        abort: once set, ends the waiting.

    Raises:
        OSError: the directory cannot be created.
    """

    def __init__(self, directory: Path, timeout_seconds: float, abort: Abort) -> None:
        super().__init__()
        self._directory, self._timeout_seconds, self._abort = directory, timeout_seconds, abort
        directory.mkdir(mode=0o700, exist_ok=True)

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """See torch's ``c10d.Store.set``."""
        path = self._path(key)
        try:
            atomic_files.write(path, value)
        except OSError as error:
            raise DistStoreError(f"{path}: {error.strerror}") from error

    def get(self, key: str) -> bytes:
        """See torch's ``c10d.Store.get``."""
        self.wait([key])
        try:
            return self._path(key).read_bytes()
        except OSError as error:
            raise DistStoreError(f"{self._path(key)}: {error.strerror}") from error

    def check(self, keys: list[str]) -> bool:
        """See torch's ``c10d.Store.check``."""
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: list[str], timeout: object = None) -> None:
        """See torch's ``c10d.Store.wait``. `timeout` is ignored: the deadline is that of this store."""
        await_keys(self, [(-1, key) for key in keys], self._timeout_seconds, self._abort)

    def _path(self, key: str) -> Path:
        return self._directory / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
