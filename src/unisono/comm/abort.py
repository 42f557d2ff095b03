"""Breaking off what waits for peers, from another thread than the one that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from unisono.errors import PeerLost

T = TypeVar("T")


class Abort:
    """Made before a communicator and handed to it; once set, all that waits there fails with `PeerLost`.

    Whoever waits in slices looks at `reason`; who sleeps in the kernel is woken by what `add_callback` was given.
    """

    def __init__(self) -> None:
        self._why = ""
        self._lock = threading.Lock()
        self._then: dict[object, Callable[[], None]] = {}

    @property
    def reason(self) -> str:
        """What `set` was given first; empty until then."""
        return self._why

    def set(self, reason: str) -> None:
        """Break off, for the reason `reason`; from any thread. Only the first call does anything."""
        if not reason:
            raise ValueError("why='': say why")
        with self._lock:
            if self._why:
                return
            self._why, waiting, self._then = reason, list(self._then.values()), {}
        for wake in waiting:
            wake()

    def check(self, during: str) -> None:
        """Raises `PeerLost` once it is set."""
        if self._why:
            raise self.lost(during)

    def lost(self, during: str) -> PeerLost:
        """The error of what was broken off in `during`: it says nothing about who is missing."""
        return PeerLost([], during, self._why)

    def add_callback(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Have ``wake()`` called when it is set, in the thread that sets it (now, where that has happened); returns
        what takes this back. `wake` must not wait for anything."""
        key = object()
        with self._lock:
            if not self._why:
                self._then[key] = wake
                return lambda: self._forget(key)
        wake()
        return lambda: None

    def run(self, during: str, call: Callable[[], T], timeout_seconds: float | None = None) -> T:
        """The result or the error of ``call()``, which listens to nobody, and so has a thread of its own.

        Once this is set, or the deadline has passed, it is left alone, and what it makes later is dropped.

        Raises:
            PeerLost: this was set first, or the deadline has passed.
        """
        self.check(during)
        answers: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()

        over = False

        def answer() -> None:
            try:
                answers.put((call(),))
            except BaseException as error:  # it is raised where the result is waited for
                if not over:  # else the error would keep its frames, they the answers, and they the error
                    answers.put(error)

        forget = self.add_callback(lambda: answers.put(None))
        try:
            threading.Thread(target=answer, name=f"{during}, may be left alone", daemon=True).start()
            answered = answers.get(timeout=timeout_seconds)
        except Empty:
            raise PeerLost([], during, f"no answer within the deadline of {timeout_seconds:g} s") from None
        finally:
            over = True
            forget()
        if answered is None:
            raise self.lost(during)
        if isinstance(answered, BaseException):
            raise answered
        return answered[0]

    def _forget(self, key: object) -> None:
        with self._lock:
            self._then.pop(key, None)
