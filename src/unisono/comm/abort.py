"""Ends operations that wait for peers, from a thread other than the one that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from unisono.errors import PeerLost

T = TypeVar("T")


class Abort:
    """A flag that is passed to a communicator: once it is set, every operation that waits there raises `PeerLost`.

    Code that polls checks `reason`; code that sleeps in the kernel is woken by a callback.
    """

    def __init__(self) -> None:
        self._reason = ""
        self._lock = threading.Lock()
        self._callbacks: dict[object, Callable[[], None]] = {}

    @property
    def reason(self) -> str:
        """The argument of the first `set`; empty as long as the flag is not set."""
        return self._reason

    def set(self, reason: str) -> None:
        """Set the flag, which ends all waiting; `reason` becomes the text of the errors.

        Any thread may call this. Later calls have no effect.
        """
        if not reason:
            raise ValueError("reason='': is empty; give the reason")
        with self._lock:
            if self._reason:
                return
            self._reason, callbacks, self._callbacks = reason, list(self._callbacks.values()), {}
        for wake in callbacks:
            wake()

    def check(self, during: str) -> None:
        """Raises `PeerLost` if the flag is set; `during` is the operation that the error names."""
        if self._reason:
            raise self.lost(during)

    def lost(self, during: str) -> PeerLost:
        """The error of the operation `during`, which this flag has ended; it names no ranks."""
        return PeerLost([], during, self._reason)

    def add_callback(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Have ``wake()`` called when the flag is set, in the thread that sets it; at once if it is set already.

        `wake` must not block. Returns a function that removes the callback.
        """
        key = object()
        with self._lock:
            if not self._reason:
                self._callbacks[key] = wake
                return lambda: self._remove(key)
        wake()
        return lambda: None

    def run(self, during: str, call: Callable[[], T], timeout_seconds: float | None = None) -> T:
        """Return the result of ``call()``, or raise its error.

        The call itself cannot be aborted, so it runs in a thread of its own. Once the flag is set, or the deadline has
        passed, the thread is abandoned and its later result is dropped.

        Raises:
            PeerLost: the flag was set, or the deadline has passed, before the call returned.
        """
        self.check(during)
        results: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()
        abandoned = False

        def run_call() -> None:
            try:
                results.put((call(),))
            except BaseException as error:  # raised in the thread that waits for the result
                if not abandoned:  # else error, frames and queue would refer to each other in a cycle
                    results.put(error)

        remove = self.add_callback(lambda: results.put(None))
        try:
            threading.Thread(target=run_call, name=f"{during}, may be abandoned", daemon=True).start()
            result = results.get(timeout=timeout_seconds)
        except Empty:
            raise PeerLost([], during, f"no answer within the deadline of {timeout_seconds:g} s") from None
        finally:
            abandoned = True
            remove()
        if result is None:
            raise self.lost(during)
        if isinstance(result, BaseException):
            raise result
        return result[0]

    def _remove(self, key: object) -> None:
        with self._lock:
            self._callbacks.pop(key, None)
