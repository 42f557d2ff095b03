"""What workers are answered, as bytes: made once for all who are answered the same."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

_WORTH_PACKING_BYTES = 4096
_MOST_KEPT = 256

Messages = tuple[dict[str, Any], dict[str, Any]]
"""An answer as ASGI's messages: its head, and its body."""


class Answers:
    """Those to the latest word; names of thousands of workers are packed to a tenth."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Messages] = {}

    def forget(self) -> None:
        """There is a later word."""
        self._made = {}

    def of(self, about: tuple[object, ...], packed: bool, make: Callable[[], bytes]) -> Messages:
        """The answer about `about`, whose body `make` makes if there is none yet; `packed` for who can unpack it."""
        found = self._made.get((about, packed))
        if found is None:
            if len(self._made) >= _MOST_KEPT:
                self.forget()
            found = self._made[about, packed] = answer(200, make(), packed)
        return found


def written(messages: Messages) -> bytes:
    """The same as HTTP/1.1 writes it."""
    start, end = messages
    lines = [b"%b: %b\r\n" % header for header in start["headers"]]
    return b"".join([STATUS_LINE[start["status"]], *lines, b"\r\n", end["body"]])


def answer(status: int, body: bytes, packed: bool = False) -> Messages:
    """JSON with HTTP's `status`."""
    headers = [(b"content-type", b"application/json")]
    if packed and len(body) >= _WORTH_PACKING_BYTES:
        body = gzip.compress(body, compresslevel=6, mtime=0)
        headers.append((b"content-encoding", b"gzip"))
    headers.append((b"content-length", b"%d" % len(body)))
    start = {"type": "http.response.start", "status": status, "headers": headers}
    return start, {"type": "http.response.body", "body": body}
