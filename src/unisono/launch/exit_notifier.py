"""Notifies the coordinator of worker processes that have exited, sooner than it would miss their heartbeats."""

from __future__ import annotations

import queue
import threading

from unisono.membership.http_client import EmptyBody, HttpConnection
from unisono.membership.protocol import CoordinatorAddress

_ANSWER_SECONDS = 2.0
_RETRY_SECONDS = 0.2


class ExitNotifier:
    """Notifies the coordinator of exits from a background thread; a context manager.

    Each name is sent until the coordinator confirms it, since the coordinator may be restarting.

    Raises:
        InvalidInput: as for `HttpConnection`.
    """

    def __init__(self, contact: CoordinatorAddress) -> None:
        self._connection = HttpConnection(contact, _ANSWER_SECONDS)
        self._names: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send, name="unisono exits", daemon=True)
        self._thread.start()

    def notify(self, worker: str) -> None:
        """Report that the process of `worker` has exited; returns at once."""
        self._names.put(worker)

    def close(self) -> None:
        """Send the names that are not confirmed yet, until the coordinator does not answer, and end the thread."""
        self._closed.set()
        self._names.put(None)
        self._thread.join()
        self._connection.close()

    def __enter__(self) -> ExitNotifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self) -> None:
        while (name := self._names.get()) is not None:
            while self._connection.request("POST", "/v1/gone", {"worker": name}, EmptyBody) is None:
                if self._closed.wait(_RETRY_SECONDS):
                    return
