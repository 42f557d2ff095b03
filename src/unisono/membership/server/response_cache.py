"""Responses to heartbeats as bytes, encoded once for all workers that receive the same response."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

_MIN_COMPRESSED_BYTES = 4096
_MAX_CACHED = 256

Header = tuple[bytes, bytes]


@dataclass(frozen=True)
class Reply:
    """A response: its HTTP status, its headers, and its body as it is sent."""

    status: int
    headers: tuple[Header, ...]
    body: bytes

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the body."""
        return hashlib.sha256(self.body).hexdigest()

    def messages(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The response as ASGI's two messages."""
        start = {"type": "http.response.start", "status": self.status, "headers": list(self.headers)}
        return start, {"type": "http.response.body", "body": self.body}

    def to_http(self, more: Sequence[Header] = ()) -> bytes:
        """The response as bytes of HTTP/1.1, with the headers `more` added."""
        lines = [b"%b: %b\r\n" % header for header in (*self.headers, *more)]
        return b"".join([STATUS_LINE[self.status], *lines, b"\r\n", self.body])


class ResponseCache:
    """Responses with the latest update. Compression reduces the names of thousands of workers to a tenth."""

    def __init__(self) -> None:
        self._replies: dict[tuple[object, ...], Reply] = {}

    def clear(self) -> None:
        """Drop all responses: there is a later update."""
        self._replies = {}

    def get(self, key: tuple[object, ...], gzipped: bool, encode: Callable[[], bytes]) -> Reply:
        """The response for `key`; `encode` returns its body if it is not cached.

        Args:
            gzipped: whether the client accepts gzip.
        """
        reply = self._replies.get((key, gzipped))
        if reply is None:
            if len(self._replies) >= _MAX_CACHED:
                self.clear()
            reply = self._replies[key, gzipped] = json_reply(200, encode(), gzipped)
        return reply


def json_reply(status: int, body: bytes, gzipped: bool = False) -> Reply:
    """A response with a JSON body, compressed if `gzipped` and long."""
    headers = [(b"content-type", b"application/json")]
    if gzipped and len(body) >= _MIN_COMPRESSED_BYTES:
        body = gzip.compress(body, compresslevel=6, mtime=0)
        headers.append((b"content-encoding", b"gzip"))
    headers.append((b"content-length", b"%d" % len(body)))
    return Reply(status, tuple(headers), body)
