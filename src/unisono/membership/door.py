"""Who may come in, and what of a request is read at all: ASGI, before anything else looks at it."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

LONGEST_BODY_BYTES = 1 << 20

Headers = Iterable[tuple[bytes, bytes]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Lets through to `app` whoever bears `token`, and says how long its body is."""

    def __init__(self, app: App, token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = self.refuses(scope["method"], scope["headers"])
        if not status:
            return await self._app(scope, receive, send)
        said = [(b"content-length", b"0")]
        said.append((b"connection", b"close"))  # what follows is not looked at
        if status == 401:
            said.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": status, "headers": said})
        await send({"type": "http.response.body", "body": b""})

    def refuses(self, method: str, said: Headers) -> int:
        """HTTP's status; 0: come in."""
        headers = dict(said)
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            return 401
        length = headers.get(b"content-length", b"" if method in ("POST", "PUT", "PATCH") else b"0")
        if b"transfer-encoding" in headers or not length:
            return 411
        return 413 if not length.isdigit() or len(length) > 9 or int(length) > LONGEST_BODY_BYTES else 0


async def body(receive: Receive) -> bytes | None:
    """All of it; None if the client has gone before it was there."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def unpacks(headers: Headers) -> bool:
    """Whether who asks can unpack gzip."""
    return any(name == b"accept-encoding" and b"gzip" in value for name, value in headers)
