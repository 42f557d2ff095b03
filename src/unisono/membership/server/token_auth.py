"""Authenticates requests and bounds their length, as ASGI middleware before everything else."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from unisono.membership.proof import PROOF_HEADER, SCHEME, RequestVerifier, SignedRequest
from unisono.membership.server.response_cache import Header, Reply

MAX_BODY_BYTES = 1 << 20

Headers = Iterable[tuple[bytes, bytes]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class TokenAuth:
    """ASGI middleware: passes a request on to `app` if it is signed with `token`, or contains it, and is not too long.

    The response to a signed request is signed.
    """

    def __init__(self, app: App, token: str) -> None:
        self._app, self._expected, self._verifier = app, f"Bearer {token}".encode(), RequestVerifier(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        query = scope.get("query_string", b"")
        target = scope.get("raw_path", scope["path"].encode()) + (b"?" + query if query else b"")
        status, claim = self.check_head(scope["method"], target, scope["headers"])
        if claim and not status:
            body = await read_body(receive)
            if body is None:
                return None
            receive = _replay(body, receive)
            status = self.check_body(claim, body)
            send = self._signing(claim, send)
        if not status:
            return await self._app(scope, receive, send)
        for message in self.refusal(status).messages():
            await send(message)

    def check_head(self, method: str, target: bytes, headers: Headers) -> tuple[int, SignedRequest | None]:
        """The HTTP status for a request's head, or 0 if it is accepted; and the verified head, if it is signed."""
        by_name = dict(headers)
        authorization, claim = by_name.get(b"authorization", b""), None
        if not hmac.compare_digest(authorization, self._expected):
            claim = self._verifier.verify(method, target.decode("latin-1"), authorization.decode("latin-1"))
            if claim is None:
                return 401, None
        return self._check_length(method, by_name), claim

    def check_body(self, claim: SignedRequest, body: bytes) -> int:
        """The HTTP status for a request's body, or 0 if it is the body that was signed."""
        return 0 if hmac.compare_digest(hashlib.sha256(body).hexdigest(), claim.digest) else 401

    def refusal(self, status: int, closes: bool = True) -> Reply:
        """The response to a refused request.

        Args:
            closes: whether the connection ends, so that nothing after this request is read.
        """
        headers = [(b"content-length", b"0")]
        if closes:
            headers.append((b"connection", b"close"))
        if status == 401:
            challenge = f"{SCHEME} {self._verifier.challenge}".encode()
            headers += [(b"www-authenticate", b"Bearer"), (b"www-authenticate", challenge)]
        return Reply(status, tuple(headers), b"")

    def proof(self, claim: SignedRequest, status: int, digest: str) -> Header:
        """The header that signs a response."""
        return PROOF_HEADER.encode(), self._verifier.proof(claim, status, digest).encode()

    def _signing(self, claim: SignedRequest, send: Send) -> Send:
        """A function to use in place of `send`: it sends a response once it is complete, and with its proof."""
        start: MutableMapping[str, Any] = {}
        parts: list[bytes] = []

        async def send_signed(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            parts.append(message.get("body", b""))
            if message.get("more_body"):
                return
            body = b"".join(parts)
            proof = self.proof(claim, start["status"], hashlib.sha256(body).hexdigest())
            await send({**start, "headers": [*start.get("headers", []), proof]})
            await send({"type": "http.response.body", "body": body})

        return send_signed

    def _check_length(self, method: str, headers: Mapping[bytes, bytes]) -> int:
        length = headers.get(b"content-length", b"" if method in ("POST", "PUT", "PATCH") else b"0")
        if b"transfer-encoding" in headers or not length:
            return 411
        return 413 if not length.isdigit() or len(length) > 9 or int(length) > MAX_BODY_BYTES else 0


def _replay(body: bytes, receive: Receive) -> Receive:
    """A function to use in place of `receive`: it first returns `body`, which was already read from `receive`."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> MutableMapping[str, Any]:
        return unread.pop() if unread else await receive()

    return replay


async def read_body(receive: Receive) -> bytes | None:
    """The whole body; None if the client disconnects before it is complete."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def accepts_gzip(headers: Headers) -> bool:
    """Whether the client accepts gzip."""
    return any(name == b"accept-encoding" and b"gzip" in value for name, value in headers)
