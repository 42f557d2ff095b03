"""Whose process has ended, told to the coordinator: sooner than it could conclude that from silence."""

from __future__ import annotations

import queue
import threading

from unisono.membership.http_client import HttpConnection, NoBody
from unisono.membership.protocol import CoordinatorAddress

_ANSWER_SECONDS = 2.0
_RETRY_SECONDS = 0.2


class ExitNotifier:
    """Tells it from a thread of its own, each name until it was heard, since the coordinator may be away. A context.

    Raises:
        InvalidInput: as `HttpConnection`.
    """

    def __init__(self, contact: CoordinatorAddress) -> None:
        self._line = HttpConnection(contact, _ANSWER_SECONDS)
        self._names: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._say, name="unisono gone", daemon=True)
        self._thread.start()

    def tell(self, worker: str) -> None:
        """The process of that name has ended; returns at once."""
        self._names.put(worker)

    def close(self) -> None:
        """What was not said until now is said once, if the coordinator is there."""
        self._closed.set()
        self._names.put(None)
        self._thread.join()
        self._line.close()

    def __enter__(self) -> ExitNotifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self) -> None:
        while (name := self._names.get()) is not None:
            while self._line.ask("POST", "/v1/gone", {"worker": name}, NoBody) is None:
                if self._closed.wait(_RETRY_SECONDS):
                    return
