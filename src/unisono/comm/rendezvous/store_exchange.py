"""What workers tell each other at their meeting place, before they are connected."""

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
    """`store`, for a library that waits in it and listens to nobody: broken off, it hears of it as an error. Who hands
    it over keeps it as well.

    Args:
        timeout_seconds: how long a key may take to come.
        abort: breaks off the waiting.
    """

    def __init__(self, store: c10d.Store, timeout_seconds: float, abort: Abort) -> None:
        super().__init__()
        self._store, self._timeout_seconds, self._abort = store, timeout_seconds, abort

    def set(self, key: str, value: Any) -> None:
        """As torch's."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """As torch's."""
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """As torch's, but that the deadline is this store's own."""
        await_keys(self._store, [(-1, key) for key in keys], self._timeout_seconds, self._abort)


def await_keys(store: c10d.Store, keys: Sequence[tuple[int, str]], timeout_seconds: float, abort: Abort) -> None:
    """Look at `store` again and again, until each rank has written its key there; rank -1 is nobody in particular.

    Raises:
        PeerLost: it was broken off, or the deadline has passed; then it names those who did not come.
    """
    end, attempt, missing = time.monotonic() + timeout_seconds, 0, keys
    while missing := [(rank, key) for rank, key in missing if not store.check([key])]:
        abort.check("connect")
        if time.monotonic() > end:
            detail = f"did not come within the deadline of {timeout_seconds:g} s"
            raise PeerLost([rank for rank, _ in missing if rank >= 0], "connect", detail)
        time.sleep(_BACKOFF.seconds(attempt))
        attempt += 1


class StoreExchange:
    """A store in which everybody writes what is theirs and reads what is the others'.

    Args:
        store: of the workers that meet; it is looked at again and again, as to wait in it is to listen to nobody.
        timeout_seconds: how long a notice may take to come.
        abort: breaks off the waiting.
    """

    def __init__(self, store: c10d.Store, timeout_seconds: float, abort: Abort) -> None:
        self._store, self._timeout_seconds, self._abort = store, timeout_seconds, abort

    def say(self, key: str, value: Any) -> None:
        """`value`, as JSON can carry it, is there for everybody from now on. Raises as `hear`."""
        self._run(lambda: self._store.set(key, json.dumps(value)))

    def hear(self, keys: Iterable[tuple[int, str]], read: Callable[[Any], T]) -> list[T]:
        """What each rank said under its key, when all of them have, as `read` makes it of plain values.

        Raises:
            PeerLost: the wait was aborted; or the deadline has passed, and the error names the missing ranks; or a
                rank's value cannot be read, as other processes may be able to write to the store.
        """
        wanted = list(keys)
        return self._run(lambda: self._collect(wanted, read))

    def exchange(self, name: str, rank: int, size: int, value: Any, read: Callable[[Any], T]) -> list[T]:
        """Everybody's `value`, in the order of ranks; `read` and errors as those of `hear`."""
        self.say(f"{name}/{rank}", value)
        return self.hear(((other, f"{name}/{other}") for other in range(size)), read)

    def _collect(self, wanted: list[tuple[int, str]], read: Callable[[Any], T]) -> list[T]:
        await_keys(self._store, wanted, self._timeout_seconds, self._abort)
        return [self._read(rank, key, read) for rank, key in wanted]

    def _read(self, rank: int, key: str, read: Callable[[Any], T]) -> T:
        try:
            return read(json.loads(self._store.get(key)))
        except (ValueError, TypeError, LookupError) as error:
            raise PeerLost([rank], "connect", f"its entry in the store is garbled ({type(error).__name__})") from error

    def _run(self, call: Callable[[], T]) -> T:
        """``call()``, which the store may keep for ever: who serves it, or holds its lock, may have been stopped."""
        try:
            return self._abort.run("connect", call, self._timeout_seconds + _GRACE_SECONDS)
        except RuntimeError as error:
            raise PeerLost([], "connect", f"the meeting place is gone: {str(error).splitlines()[0]}") from error
