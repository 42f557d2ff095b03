"""A client's connection to the coordinator."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from unisono.errors import InvalidInput
from unisono.membership.values import Contact

_LONGEST_ANSWER_BYTES = 16 << 20


@dataclass(frozen=True)
class Answer:
    """What the coordinator said: HTTP's status, and the body as JSON; None where there is none."""

    status: int
    body: Any


class Line:
    """A connection that is made again when it is needed.

    Args:
        contact: of the coordinator.
        answer_seconds: how long one is waited for.

    Attributes:
        refused: when last asked, nobody listened there.

    Raises:
        InvalidInput: the contact's URL is none, or its authority cannot be read.
    """

    def __init__(self, contact: Contact, answer_seconds: float = 10.0) -> None:
        self.refused = False
        host, port, secure = _address(contact.url)
        self._headers = {"authorization": f"Bearer {contact.token}", "content-type": "application/json",
                         "accept-encoding": "gzip"}  # fmt: skip
        self._made: http.client.HTTPConnection
        if secure:
            self._made = http.client.HTTPSConnection(
                host, port, timeout=answer_seconds, context=_trust(contact.authority)
            )
        else:
            self._made = http.client.HTTPConnection(host, port, timeout=answer_seconds)

    def post(self, path: str, message: object) -> object | None:
        """The answer's body; None if there is none, or it is an error."""
        answer = self.ask("POST", path, message)
        body: object = answer.body if answer and answer.status == 200 else None
        return body

    def ask(self, method: str, path: str, message: object = None) -> Answer | None:
        """The answer; None if the coordinator is away."""
        try:
            answer = self._asked(method, path, None if message is None else json.dumps(message))
            body = _unpacked(answer)
            self.refused = False
            return Answer(answer.status, json.loads(body) if body and answer.status < 400 else None)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.refused = isinstance(error, ConnectionRefusedError)
            self._made.close()
            return None

    def _asked(self, method: str, path: str, body: str | None) -> http.client.HTTPResponse:
        used = self._made.sock is not None
        try:
            self._made.request(method, path, body, self._headers)
            return self._made.getresponse()
        except (ConnectionError, http.client.BadStatusLine):
            if not used:
                raise
        self._made.close()  # the other end has closed it while nothing was said; what is said twice does no harm
        self._made.request(method, path, body, self._headers)
        return self._made.getresponse()

    def cut(self) -> None:
        """Whoever waits for an answer gets none."""
        wire = self._made.sock
        if wire is not None:
            with suppress(OSError):  # it was not connected any more
                wire.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nobody asks any more."""
        self._made.close()


def ask(contact: Contact, path: str) -> Any:
    """What the coordinator answers; None if it knows nothing of the kind.

    Raises:
        InvalidInput: nobody answers, or the token is another run's.
    """
    answer = heard(contact, Line(contact).ask("GET", path))
    return answer.body if answer.status == 200 else None


def heard(contact: Contact, answer: Answer | None) -> Answer:
    """`answer`, if it is one to whoever may ask.

    Raises:
        InvalidInput: else.
    """
    if answer is None:
        secure = contact.url.startswith("https:")
        problem = "nobody answers there" + (", or its certificate is not known here" if secure else "")
        cure = "check the address, and that the run is under way" + ("; or give --authority FILE" if secure else "")
        raise InvalidInput("coordinator", contact.url, problem, cure)
    if answer.status == 401:
        raise InvalidInput("token", "(not shown)", "it is not that of the coordinator", "give the one of this run")
    return answer


def _unpacked(answer: http.client.HTTPResponse) -> bytes:
    body = answer.read(_LONGEST_ANSWER_BYTES)
    if answer.headers.get("content-encoding") != "gzip":
        return body
    try:
        return zlib.decompressobj(_GZIP).decompress(body, _LONGEST_ANSWER_BYTES)
    except zlib.error as error:
        raise ValueError("an answer that cannot be unpacked") from error


_GZIP = 16 + zlib.MAX_WBITS


def _address(url: str) -> tuple[str, int, bool]:
    wrong = InvalidInput("coordinator", url, "no address of one", "write http://host:port")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise wrong
    return parts.hostname, port, parts.scheme == "https"


def _trust(authority: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authority or None)
    except OSError as error:
        raise InvalidInput(
            "authority",
            authority,
            f"no certificate that can be read ({error.strerror or error})",
            "name a file in PEM format",
        ) from error
