"""Who may come in, and what of a request is read at all: ASGI, before anything else looks at it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from unisono.membership.proof import HEADER, SCHEME, RequestVerifier, SignedRequest
from unisono.membership.server.response_cache import Header, Reply

LONGEST_BODY_BYTES = 1 << 20

Headers = Iterable[tuple[bytes, bytes]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class TokenAuth:
    """ASGI middleware: passes on to `app` requests that are signed with `token`, or bear it, and whose length is
    bounded. The answer to a signed request is signed."""

    def __init__(self, app: App, token: str) -> None:
        self._app, self._expected, self._verifier = app, f"Bearer {token}".encode(), RequestVerifier(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        query = scope.get("query_string", b"")
        target = scope.get("raw_path", scope["path"].encode()) + (b"?" + query if query else b"")
        status, claim = self.judge(scope["method"], target, scope["headers"])
        if claim and not status:
            said = await body(receive)
            if said is None:
                return None
            receive = _again(said, receive)
            status = self.check_body(claim, said)
            send = self._proved(claim, send)
        if not status:
            return await self._app(scope, receive, send)
        for message in self.refusal(status).messages():
            await send(message)

    def judge(self, method: str, target: bytes, said: Headers) -> tuple[int, SignedRequest | None]:
        """HTTP's status for a request's head, 0 where it is admitted; and the verified head, if it is signed."""
        headers = dict(said)
        given, claim = headers.get(b"authorization", b""), None
        if not hmac.compare_digest(given, self._expected):
            claim = self._verifier.claim(method, target.decode("latin-1"), given.decode("latin-1"))
            if claim is None:
                return 401, None
        return self._length(method, headers), claim

    def check_body(self, claim: SignedRequest, said: bytes) -> int:
        """HTTP's status: 0 where the body is the one that was signed."""
        return 0 if hmac.compare_digest(hashlib.sha256(said).hexdigest(), claim.digest) else 401

    def refusal(self, status: int, closes: bool = True) -> Reply:
        """The answer to a request that is refused; `closes`: the connection ends, and what follows is not read."""
        headers = [(b"content-length", b"0")]
        if closes:
            headers.append((b"connection", b"close"))
        if status == 401:
            challenge = f"{SCHEME} {self._verifier.challenge}".encode()
            headers += [(b"www-authenticate", b"Bearer"), (b"www-authenticate", challenge)]
        return Reply(status, tuple(headers), b"")

    def proof(self, claim: SignedRequest, status: int, digest: str) -> Header:
        """The header that signs an answer."""
        return HEADER.encode(), self._verifier.proof(claim, status, digest).encode()

    def _proved(self, claim: SignedRequest, send: Send) -> Send:
        """As `send`, for an answer that is sent when it is whole."""
        start: MutableMapping[str, Any] = {}
        parts: list[bytes] = []

        async def proved(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            parts.append(message.get("body", b""))
            if message.get("more_body"):
                return
            whole = b"".join(parts)
            proof = self.proof(claim, start["status"], hashlib.sha256(whole).hexdigest())
            await send({**start, "headers": [*start.get("headers", []), proof]})
            await send({"type": "http.response.body", "body": whole})

        return proved

    def _length(self, method: str, headers: Mapping[bytes, bytes]) -> int:
        length = headers.get(b"content-length", b"" if method in ("POST", "PUT", "PATCH") else b"0")
        if b"transfer-encoding" in headers or not length:
            return 411
        return 413 if not length.isdigit() or len(length) > 9 or int(length) > LONGEST_BODY_BYTES else 0


def _again(said: bytes, receive: Receive) -> Receive:
    """As `receive` before the body `said` was taken from it."""
    waiting = [{"type": "http.request", "body": said, "more_body": False}]

    async def again() -> MutableMapping[str, Any]:
        return waiting.pop() if waiting else await receive()

    return again


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
