"""What workers tell each other at their meeting place, before they are connected."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch._C import _distributed_c10d as c10d

from unisono.comm.abort import Abort
from unisono.errors import PeerLost

T = TypeVar("T")
_GRACE_SECONDS = 1.0
_SHORTEST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 100e-6, 5e-3


class Notices:
    """A store in which everybody writes what is theirs and reads what is the others'.

    Args:
        store: of the workers that meet; it is looked at again and again, as to wait in it is to listen to nobody.
        deadline_seconds: how long a notice may take to come.
        abort: breaks off the waiting.
    """

    def __init__(self, store: c10d.Store, deadline_seconds: float, abort: Abort) -> None:
        self._store, self._deadline_seconds, self._abort = store, deadline_seconds, abort

    def say(self, key: str, value: Any) -> None:
        """`value`, as JSON can carry it, is there for everybody from now on. Raises as `hear`."""
        self._run(lambda: self._store.set(key, json.dumps(value)))

    def hear(self, keys: Iterable[tuple[int, str]]) -> list[Any]:
        """What each rank said under its key, when all of them have.

        Raises:
            PeerLost: it was broken off, or the deadline has passed; then it names those who did not come.
        """
        wanted = list(keys)
        return self._run(lambda: self._collect(wanted))

    def exchange(self, name: str, rank: int, size: int, value: Any) -> list[Any]:
        """Everybody's `value`, in the order of ranks; raises as `hear`."""
        self.say(f"{name}/{rank}", value)
        return self.hear((other, f"{name}/{other}") for other in range(size))

    def _collect(self, wanted: list[tuple[int, str]]) -> list[Any]:
        end, sleep_seconds = time.monotonic() + self._deadline_seconds, _SHORTEST_SLEEP_SECONDS
        missing = wanted
        while missing := [(rank, key) for rank, key in missing if not self._store.check([key])]:
            self._abort.check("connect")
            if time.monotonic() > end:
                detail = f"did not come within the deadline of {self._deadline_seconds:g} s"
                raise PeerLost([rank for rank, _ in missing], "connect", detail)
            time.sleep(sleep_seconds)
            sleep_seconds = min(1.5 * sleep_seconds, _LONGEST_SLEEP_SECONDS)
        return [json.loads(self._store.get(key)) for _, key in wanted]

    def _run(self, call: Callable[[], T]) -> T:
        """``call()``, which the store may keep for ever: who serves it, or holds its lock, may have been stopped."""
        try:
            return self._abort.run("connect", call, self._deadline_seconds + _GRACE_SECONDS)
        except RuntimeError as error:
            raise PeerLost([], "connect", f"the meeting place is gone: {str(error).splitlines()[0]}") from error
