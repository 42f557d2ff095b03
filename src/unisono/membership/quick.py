"""Beats are heard where their bytes arrive: a task, its queue and a scope for each would cost three times as much as
what is done about it, and when thousands of workers turn to another view, all others wait for that."""

from __future__ import annotations

import logging
from typing import Any

from unisono.membership.answers import Messages, answer, written
from unisono.membership.door import Guard, unpacks
from unisono.membership.hurry import Hurried
from unisono.membership.service import BEAT, Ear, Waiting

LOG = logging.getLogger("unisono")
_PATH = BEAT.encode()


class Quick(Hurried):
    """uvicorn's protocol, which does everything but beats; and those too that come in a way which workers do not have.

    Args:
        guard: who may come in.
        ear: hears beats.
    """

    def __init__(self, *, guard: Guard, ear: Ear, **given: Any) -> None:
        super().__init__(**given)
        self._guard, self._ear = guard, ear
        self._said: bytearray | None = None  # of a beat that is on its way
        self._waiting: Waiting | None = None

    def on_message_begin(self) -> None:
        """Whoever says something before it was answered is nobody we know."""
        if self._waiting is not None:
            self.transport.abort()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """From now on it is known whether it is a beat."""
        self._head_bytes = None
        free = self.cycle is None or self.cycle.response_complete
        if free and self._waiting is None and self._is_beat():
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
        super().on_message_complete() if self._said is None else self._hear(self._said)

    def connection_lost(self, error: Exception | None) -> None:
        """Nobody waits for an answer any more."""
        super().connection_lost(error)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._ear.hung_up(waiting)

    def _is_beat(self) -> bool:
        plain = self.parser.get_http_version() == "1.1" and self.parser.should_keep_alive()
        beat = self.url == _PATH and self.parser.get_method() == b"POST"
        return beat and plain and not self.expect_100_continue and not self._guard.refuses("POST", self.headers)

    def _hear(self, said: bytearray) -> None:
        self._said = None
        self._late.cancel()
        try:
            self._waiting = self._ear.hear(bytes(said), unpacks(self.headers), self._reply)
        except Exception:
            LOG.exception("a beat could not be answered")
            self._reply(answer(500, b"{}"))

    def _reply(self, messages: Messages) -> None:
        self._waiting = None
        if not self.transport.is_closing():
            self.transport.write(written(messages))
            self.on_response_complete()
