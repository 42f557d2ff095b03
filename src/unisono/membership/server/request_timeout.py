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

REQUEST_SECONDS = 10.0
"""The longest time from the connection, or from a request's first byte, to the request's last byte; also the longest
time of a TLS handshake."""
MAX_HEAD_BYTES = 512 << 10
"""The most bytes that are read until a request's head is complete; the last read may include the request's body."""


class TimeoutProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a timeout for requests, and a bound on the length of their heads."""

    _timer: asyncio.TimerHandle
    _head_bytes: int | None = 0  # how many were read since the request began; None: the request's head is complete

    def connection_made(self, transport: Any) -> None:
        """Start the timeout of the first request."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Abort the connection if the head is too long."""
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Start the timeout of this request."""
        super().on_message_begin()
        self._head_bytes = 0
        self._timer.cancel()
        self._start_timer()

    def on_headers_complete(self) -> None:
        """Stop counting bytes. `TokenAuth` checks the body's length and the token before the body is stored."""
        self._head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Stop the timeout."""
        self._timer.cancel()
        super().on_message_complete()

    def connection_lost(self, error: Exception | None) -> None:
        """Stop the timeout."""
        self._timer.cancel()
        super().connection_lost(error)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _unsupported_upgrade_warning(self) -> None:
        self.logger.warning("Unsupported upgrade request.")  # without uvicorn's advice on what to install


class TimeoutLoop(uvloop.Loop):
    """uvloop's event loop with a timeout for TLS handshakes that is shorter than uvloop's own, a minute."""

    async def create_server(  # type: ignore[override]  # of all arguments, only this one matters
        self, *args: Any, ssl: Any = None, **others: Any
    ) -> asyncio.AbstractServer:
        """See `asyncio.loop.create_server`."""
        if ssl is not None:
            others["ssl_handshake_timeout"] = REQUEST_SECONDS
        return await super().create_server(*args, ssl=ssl, **others)


class WarningThinner(logging.Filter):
    """Passes the 1st, 2nd, 4th, 8th … warning of each kind, with its number, and everything that is not a warning."""

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


WARNING_THINNER = WarningThinner()


def allow_connections() -> None:
    """Raise this process's soft limit on open files to its hard limit.

    Each worker has two connections, and the soft limit is often 1024.
    """
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a hard limit of "unlimited" can be more than the system allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
