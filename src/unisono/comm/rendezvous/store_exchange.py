"""Exchange of values through a store, before workers are connected."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch._C import _distributed_c10d as c10d

from unisono.comm.abort import Abort
from unisono.errors import PeerLost
from unisono.system.backoff import Backoff

T = TypeVar("T")
_GRACE_SECONDS = 1.0
_BACKOFF = Backoff(first_seconds=100e-6, factor=1.5, longest_seconds=5e-3)


class AbortableStore(c10d.Store):
    """A view of `store` for a library that waits for keys: the wait ends with an error once `abort` is set.

    The caller must keep a reference to this object, as the library only refers to its C++ part.

    Args:
        timeout_seconds: how long to wait for a key.
        abort: once set, ends the waiting.
    """

    def __init__(self, store: c10d.Store, timeout_seconds: float, abort: Abort) -> None:
        super().__init__()
        self._store, self._timeout_seconds, self._abort = store, timeout_seconds, abort

    def set(self, key: str, value: Any) -> None:
        """See torch's ``c10d.Store.set``."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """See torch's ``c10d.Store.get``."""
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """See torch's ``c10d.Store.wait``. `timeout` is ignored: the deadline is that of this store."""
        await_keys(self._store, [(-1, key) for key in keys], self._timeout_seconds, self._abort)


def await_keys(store: c10d.Store, keys: Sequence[tuple[int, str]], timeout_seconds: float, abort: Abort) -> None:
    """Poll `store` until it has all `keys`. Each key comes with the rank that writes it; -1: that rank is not known.

    Raises:
        PeerLost: `abort` was set; or the deadline has passed, and the error names the missing ranks.
    """
    end, attempt, missing = time.monotonic() + timeout_seconds, 0, keys
    while missing := [(rank, key) for rank, key in missing if not store.check([key])]:
        abort.check("connect")
        if time.monotonic() > end:
            detail = f"no entry in the store within the deadline of {timeout_seconds:g} s"
            raise PeerLost([rank for rank, _ in missing if rank >= 0], "connect", detail)
        time.sleep(_BACKOFF.seconds(attempt))
        attempt += 1


class StoreExchange:
    """Exchanges values between workers through a store: each worker writes some, and all others read them.

    Args:
        store: a store that the workers share. It is polled, as waiting in it could not be aborted.
        timeout_seconds: how long to wait for a value.
        abort: once set, ends the waiting.
    """

    def __init__(self, store: c10d.Store, timeout_seconds: float, abort: Abort) -> None:
        self._store, self._timeout_seconds, self._abort = store, timeout_seconds, abort

    def publish(self, key: str, value: Any) -> None:
        """Write `value`, which JSON must be able to represent, to the store. Raises the errors of `collect`."""
        self._run(lambda: self._store.set(key, json.dumps(value)))

    def collect(self, keys: Iterable[tuple[int, str]], read: Callable[[Any], T]) -> list[T]:
        """Wait for the values of `keys`, of which each comes with the rank that writes it.

        `read` converts each value from what JSON can represent.

        Raises:
            PeerLost: the wait was aborted; or the deadline has passed, and the error names the missing ranks; or a
                rank's value cannot be read, as other processes may be able to write to the store.
        """
        listed = list(keys)
        return self._run(lambda: self._collect_all(listed, read))

    def exchange(self, name: str, rank: int, size: int, value: Any, read: Callable[[Any], T]) -> list[T]:
        """Collective: the `value` of every rank, in the order of ranks; `read` and errors as in `collect`."""
        self.publish(f"{name}/{rank}", value)
        return self.collect(((other, f"{name}/{other}") for other in range(size)), read)

    def _collect_all(self, keys: list[tuple[int, str]], read: Callable[[Any], T]) -> list[T]:
        await_keys(self._store, keys, self._timeout_seconds, self._abort)
        return [self._read(rank, key, read) for rank, key in keys]

    def _read(self, rank: int, key: str, read: Callable[[Any], T]) -> T:
        try:
            return read(json.loads(self._store.get(key)))
        except (ValueError, TypeError, LookupError) as error:
            raise PeerLost([rank], "connect", f"its entry in the store is garbled ({type(error).__name__})") from error

    def _run(self, call: Callable[[], T]) -> T:
        """The result of ``call()``, with a deadline: the process that serves the store may be stopped."""
        try:
            return self._abort.run("connect", call, self._timeout_seconds + _GRACE_SECONDS)
        except RuntimeError as error:
            raise PeerLost([], "connect", f"the store has failed: {str(error).splitlines()[0]}") from error
