"""Heartbeats are processed where their bytes arrive, before ASGI.

A task, a queue and a scope of ASGI would cost three times as much as the heartbeat itself. When thousands of workers
change to another view at once, each would wait for the cost of all others.
"""

from __future__ import annotations

import logging
from typing import Any

from unisono.membership.proof import CHALLENGE_PATH, SignedRequest
from unisono.membership.server.app import HEARTBEAT_PATH
from unisono.membership.server.request_timeout import TimeoutProtocol
from unisono.membership.server.response_cache import Reply, json_reply
from unisono.membership.server.service import HeartbeatRoute, PendingReply
from unisono.membership.server.token_auth import TokenAuth, accepts_gzip

LOG = logging.getLogger("unisono")
_HEARTBEAT = b"POST", HEARTBEAT_PATH.encode()
_CHALLENGE = b"GET", CHALLENGE_PATH.encode()


class FastHeartbeatProtocol(TimeoutProtocol):
    """Processes heartbeats and requests for a challenge itself, and leaves all other requests to uvicorn.

    Heartbeats and requests for a challenge that have an unusual form are left to uvicorn, too.

    Args:
        auth: authenticates requests.
        route: processes heartbeats.
    """

    def __init__(self, *, auth: TokenAuth, route: HeartbeatRoute, **others: Any) -> None:
        super().__init__(**others)
        self._auth, self._route = auth, route
        self._body: bytearray | None = None  # what has arrived of the body of a heartbeat
        self._pending: PendingReply | None = None
        self._claim: SignedRequest | None = None  # the verified head of the current heartbeat
        self._wants_challenge = False

    def on_message_begin(self) -> None:
        """Abort the connection if its previous request is not answered yet: no worker sends a request that early."""
        if self._pending is not None:
            self.transport.abort()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Decide whether this class processes the request, or uvicorn does."""
        self._head_bytes = None
        idle = (self.cycle is None or self.cycle.response_complete) and self._pending is None
        self._wants_challenge = idle and self._asks_for_challenge()
        if self._wants_challenge or (idle and self._is_heartbeat()):
            self._body = bytearray()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Collect the body, whose length `TokenAuth` has checked."""
        if self._body is None:
            super().on_body(body)
        else:
            self._body += body

    def on_message_complete(self) -> None:
        """Process the request."""
        if self._body is None:
            super().on_message_complete()
        elif self._wants_challenge:
            self._body = None
            self._timer.cancel()
            self._send(self._auth.refusal(401, closes=False))
        else:
            self._receive(self._body)

    def connection_lost(self, error: Exception | None) -> None:
        """Drop the pending response."""
        super().connection_lost(error)
        pending, self._pending = self._pending, None
        if pending is not None:
            self._route.disconnected(pending)

    def _is_plain(self) -> bool:
        keep_alive = self.parser.get_http_version() == "1.1" and self.parser.should_keep_alive()
        return keep_alive and not self.expect_100_continue

    def _asks_for_challenge(self) -> bool:
        """Whether the request asks for a challenge, and has no body: its sender is not authenticated."""
        if (self.parser.get_method(), self.url) != _CHALLENGE or not self._is_plain():
            return False
        headers = dict(self.headers)
        return headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers

    def _is_heartbeat(self) -> bool:
        if (self.parser.get_method(), self.url) != _HEARTBEAT or not self._is_plain():
            return False
        status, self._claim = self._auth.check_head("POST", self.url, self.headers)
        return not status

    def _receive(self, body: bytearray) -> None:
        self._body = None
        self._timer.cancel()
        if self._claim and self._auth.check_body(self._claim, bytes(body)):
            self._claim = None
            self._send(self._auth.refusal(401))
            self.transport.close()
            return
        try:
            self._pending = self._route.receive(bytes(body), accepts_gzip(self.headers), self._send)
        except Exception:
            LOG.exception("a heartbeat could not be processed")
            self._send(json_reply(500, b"{}"))

    def _send(self, reply: Reply) -> None:
        self._pending, claim, self._claim = None, self._claim, None
        if not self.transport.is_closing():
            proof = [self._auth.proof(claim, reply.status, reply.digest)] if claim else []
            self.transport.write(reply.to_http(proof))
            self.on_response_complete()
