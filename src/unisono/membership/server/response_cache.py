"""What workers are answered, as bytes: made once for all who are answered the same."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

_WORTH_PACKING_BYTES = 4096
_MOST_KEPT = 256

Header = tuple[bytes, bytes]


@dataclass(frozen=True)
class Reply:
    """An answer: HTTP's status, its headers, and its body as it travels."""

    status: int
    headers: tuple[Header, ...]
    body: bytes

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the body; taken once for all who are answered the same."""
        return hashlib.sha256(self.body).hexdigest()

    def messages(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """As ASGI has it."""
        start = {"type": "http.response.start", "status": self.status, "headers": list(self.headers)}
        return start, {"type": "http.response.body", "body": self.body}

    def written(self, more: Sequence[Header] = ()) -> bytes:
        """As HTTP/1.1 writes it, with `more` headers."""
        lines = [b"%b: %b\r\n" % header for header in (*self.headers, *more)]
        return b"".join([STATUS_LINE[self.status], *lines, b"\r\n", self.body])


class ResponseCache:
    """Those to the latest word; names of thousands of workers are packed to a tenth."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Reply] = {}

    def forget(self) -> None:
        """There is a later word."""
        self._made = {}

    def of(self, about: tuple[object, ...], packed: bool, make: Callable[[], bytes]) -> Reply:
        """The answer about `about`, whose body `make` makes if there is none yet; `packed` for who can unpack it."""
        found = self._made.get((about, packed))
        if found is None:
            if len(self._made) >= _MOST_KEPT:
                self.forget()
            found = self._made[about, packed] = answer(200, make(), packed)
        return found


def answer(status: int, body: bytes, packed: bool = False) -> Reply:
    """JSON with HTTP's `status`."""
    headers = [(b"content-type", b"application/json")]
    if packed and len(body) >= _WORTH_PACKING_BYTES:
        body = gzip.compress(body, compresslevel=6, mtime=0)
        headers.append((b"content-encoding", b"gzip"))
    headers.append((b"content-length", b"%d" % len(body)))
    return Reply(status, tuple(headers), body)
