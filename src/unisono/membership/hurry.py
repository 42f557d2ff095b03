"""A client that begins a request and does not end it holds a connection, and memory: it is not waited for long."""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

REQUEST_SECONDS = 10.0  # from the connection, or a request's first byte, to its last


class Hurried(HttpToolsProtocol):
    """uvicorn's protocol, which by itself waits for ever for the rest of a request."""

    _late: asyncio.TimerHandle

    def connection_made(self, transport: Any) -> None:
        """A request has to come."""
        super().connection_made(transport)
        self._hurry()

    def on_message_begin(self) -> None:
        """The rest of it has to come."""
        super().on_message_begin()
        self._late.cancel()
        self._hurry()

    def on_message_complete(self) -> None:
        """It came."""
        self._late.cancel()
        super().on_message_complete()

    def connection_lost(self, error: Exception | None) -> None:
        """Nothing comes any more."""
        self._late.cancel()
        super().connection_lost(error)

    def _hurry(self) -> None:
        self._late = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)


def allow_connections() -> None:
    """As many as this process may have: two for each worker, and many systems begin with a thousand files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # where "no limit" is more than the system has: then as many as there were
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
