"""Bounds on the cost of clients without the token: seconds and memory of a connection, and lines of the log."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from contextlib import suppress
from typing import Any

import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

REQUEST_SECONDS = 10.0  # from the connection, or a request's first byte, to its last; and for the handshake of TLS
LONGEST_HEAD_BYTES = 512 << 10  # of what is read at once; one read may hold a body too


class TimeoutProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which by itself waits for ever for the rest of a request, and takes a head of any length."""

    _late: asyncio.TimerHandle
    _head_bytes: int | None = 0  # read since the request began; None: its head is complete

    def connection_made(self, transport: Any) -> None:
        """A request has to come."""
        super().connection_made(transport)
        self._hurry()

    def data_received(self, data: bytes) -> None:
        """Some of it; a head that is too long ends the connection."""
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > LONGEST_HEAD_BYTES:
                self.transport.abort()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """The rest of it has to come."""
        super().on_message_begin()
        self._head_bytes = 0
        self._late.cancel()
        self._hurry()

    def on_headers_complete(self) -> None:
        """A body is not kept before its length is known and the token was looked at."""
        self._head_bytes = None
        super().on_headers_complete()

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

    def _unsupported_upgrade_warning(self) -> None:
        self.logger.warning("Unsupported upgrade request.")  # without advice on what to install


class HurriedLoop(uvloop.Loop):
    """uvloop's, which by itself waits for a minute for the handshake of TLS."""

    async def create_server(  # type: ignore[override]  # of all that it takes, only this is looked at
        self, *args: Any, ssl: Any = None, **given: Any
    ) -> asyncio.AbstractServer:
        """The same, with a time for handshakes."""
        if ssl is not None:
            given["ssl_handshake_timeout"] = REQUEST_SECONDS
        return await super().create_server(*args, ssl=ssl, **given)


class Seldom(logging.Filter):
    """Lets the 1st, 2nd, 4th, 8th … warning of a kind through, and says which it is; and all errors."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        if record.levelno != logging.WARNING:
            return True
        kind = str(record.msg)
        self._counts[kind] += 1
        count = self._counts[kind]
        if count > 1:
            record.msg, record.args = f"{record.getMessage()} ({count} times until now)", ()
        return count & (count - 1) == 0


SELDOM = Seldom()


def allow_connections() -> None:
    """As many as this process may have: two for each worker, and many systems begin with a thousand files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # where "no limit" is more than the system has: then as many as there were
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
