"""Beats are heard where their bytes arrive: a task, its queue and a scope for each would cost three times as much as
what is done about it, and when thousands of workers turn to another view, all others wait for that."""

from __future__ import annotations

import logging
from typing import Any

from unisono.membership.proof import PATH, SignedRequest
from unisono.membership.server.request_timeout import TimeoutProtocol
from unisono.membership.server.response_cache import Reply, answer
from unisono.membership.server.service import BEAT, HeartbeatRoute, Waiting
from unisono.membership.server.token_auth import TokenAuth, unpacks

LOG = logging.getLogger("unisono")
_BEAT = b"POST", BEAT.encode()
_CHALLENGE = b"GET", PATH.encode()


class FastHeartbeatProtocol(TimeoutProtocol):
    """uvicorn's protocol, which does everything but beats; and those too that come in a way which workers do not have.

    Args:
        guard: who may come in.
        ear: hears beats.
    """

    def __init__(self, *, guard: TokenAuth, ear: HeartbeatRoute, **given: Any) -> None:
        super().__init__(**given)
        self._guard, self._ear = guard, ear
        self._said: bytearray | None = None  # of a beat that is on its way
        self._waiting: Waiting | None = None
        self._claim: SignedRequest | None = None  # of the beat that is heard
        self._wants_challenge = False

    def on_message_begin(self) -> None:
        """Whoever says something before it was answered is nobody we know."""
        if self._waiting is not None:
            self.transport.abort()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """From now on it is known whether it is a beat."""
        self._head_bytes = None
        free = (self.cycle is None or self.cycle.response_complete) and self._waiting is None
        self._wants_challenge = free and self._asks_for_challenge()
        if self._wants_challenge or (free and self._is_beat()):
            self._said = bytearray()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """As long as its head said, which is not too long."""
        if self._said is None:
            super().on_body(body)
        else:
            self._said += body

    def on_message_complete(self) -> None:
        """All of it is there."""
        if self._said is None:
            super().on_message_complete()
        elif self._wants_challenge:
            self._said = None
            self._late.cancel()
            self._reply(self._guard.refusal(401, closes=False))
        else:
            self._hear(self._said)

    def connection_lost(self, error: Exception | None) -> None:
        """Nobody waits for an answer any more."""
        super().connection_lost(error)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._ear.hung_up(waiting)

    def _is_plain(self) -> bool:
        lasts = self.parser.get_http_version() == "1.1" and self.parser.should_keep_alive()
        return lasts and not self.expect_100_continue

    def _asks_for_challenge(self) -> bool:
        """Without a body, of which nothing would be known."""
        if (self.parser.get_method(), self.url) != _CHALLENGE or not self._is_plain():
            return False
        headers = dict(self.headers)
        return headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers

    def _is_beat(self) -> bool:
        if (self.parser.get_method(), self.url) != _BEAT or not self._is_plain():
            return False
        status, self._claim = self._guard.judge("POST", self.url, self.headers)
        return not status

    def _hear(self, said: bytearray) -> None:
        self._said = None
        self._late.cancel()
        if self._claim and self._guard.check_body(self._claim, bytes(said)):
            self._claim = None
            self._reply(self._guard.refusal(401))
            self.transport.close()
            return
        try:
            self._waiting = self._ear.hear(bytes(said), unpacks(self.headers), self._reply)
        except Exception:
            LOG.exception("a beat could not be answered")
            self._reply(answer(500, b"{}"))

    def _reply(self, reply: Reply) -> None:
        self._waiting, claim, self._claim = None, self._claim, None
        if not self.transport.is_closing():
            proof = [self._guard.proof(claim, reply.status, reply.digest)] if claim else []
            self.transport.write(reply.written(proof))
            self.on_response_complete()
