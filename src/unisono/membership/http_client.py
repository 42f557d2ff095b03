"""A client's connection to the coordinator."""

from __future__ import annotations

import copy
import json
import socket
import ssl
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import httptools
from pydantic import BaseModel

from unisono.errors import InvalidInput
from unisono.membership.certificate import is_pin, pin
from unisono.membership.proof import PATH, RequestSigner
from unisono.membership.protocol import CoordinatorAddress

_LONGEST_ANSWER_BYTES = 16 << 20
_READ_BYTES = 1 << 16
Body = TypeVar("Body", bound=BaseModel)


class NoBody(BaseModel):
    """Of an answer whose status alone is looked at."""


@dataclass(frozen=True)
class Answer(Generic[Body]):
    """What the coordinator said: HTTP's status, and the message that was asked for; None with any status but 200."""

    status: int
    body: Body | None


class HttpConnection:
    """A connection that is made again when it is needed.

    A training step waits for whoever interrupts its worker, so a request is one packet, for which the other end wakes
    up once, and its answer is read by the same parser in C as there.

    Args:
        contact: of the coordinator.
        answer_seconds: how long one is waited for.

    Attributes:
        refused: when last asked, nobody listened there.

    Raises:
        InvalidInput: the contact's URL is none, its token cannot be said, or its authority cannot be read.
    """

    def __init__(self, contact: CoordinatorAddress, answer_seconds: float = 10.0) -> None:
        self.refused = self._cut = False
        self._host, self._port, secure = _address(contact.url)
        self._seconds = answer_seconds
        self._pin = contact.authority if secure and is_pin(contact.authority) else ""
        self._trust = _trust("" if self._pin else contact.authority, bool(self._pin)) if secure else None
        self._head = (
            f"host: {urlsplit(contact.url).netloc.rpartition('@')[2]}\r\n"
            "content-type: application/json\r\naccept-encoding: gzip\r\n"
        )
        self._signer = RequestSigner(_sayable(contact.token))
        self._wire: socket.socket | None = None

    def sibling(self) -> HttpConnection:
        """Another connection to the same coordinator, which shares its challenge."""
        other = copy.copy(self)
        other.refused = other._cut = False
        other._signer, other._wire = self._signer.sibling(), None
        return other

    def get(self, path: str, kind: type[Body]) -> Answer[Body] | None:
        """As `ask`."""
        return self.ask("GET", path, None, kind)

    def post(self, path: str, message: object, kind: type[Body]) -> Body | None:
        """The message that is answered; None if there is none."""
        answer = self.ask("POST", path, message, kind)
        return answer.body if answer else None

    def ask(self, method: str, path: str, message: object, kind: type[Body]) -> Answer[Body] | None:
        """The answer, whose message is of that `kind`; None if the coordinator is away, or answers something else."""
        said = b"" if message is None else json.dumps(message).encode()
        try:
            answer = self._believed(method, path, said)
            self.refused = False
            return Answer(answer.status, kind.model_validate_json(answer.body) if answer.status == 200 else None)
        except (OSError, ValueError, httptools.HttpParserError) as error:
            self.refused = isinstance(error, ConnectionRefusedError)
            self.close()
            return None

    def cut(self) -> None:
        """Whoever waits for an answer gets none, now or later."""
        self._cut, wire = True, self._wire
        if wire is not None:
            with suppress(OSError):  # it was not connected any more
                wire.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nobody asks any more."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def _believed(self, method: str, path: str, said: bytes) -> _Reading:
        """The answer, whose signature was verified, or 401.

        Raises:
            ValueError: the answer was not signed with the token.
        """
        known = bool(self._signer.challenge)
        if not known:
            self._learn()
        answer = self._asked(method, path, said)
        if answer.status == 401 and known:  # the coordinator was started again
            self._learn()
            answer = self._asked(method, path, said)
        if answer.status != 401 and not self._signer.verifies(answer.status, answer.sent, answer.proof):
            raise ValueError("an answer that is not signed with the token")
        return answer

    def _learn(self) -> None:
        asked = self._exchanged(lambda: f"GET {PATH} HTTP/1.1\r\n{self._head}content-length: 0\r\n\r\n".encode())
        if not any(self._signer.accept_challenge(said) for said in asked.challenges):
            raise ValueError("no coordinator of this version")

    def _asked(self, method: str, path: str, said: bytes) -> _Reading:
        def request() -> bytes:
            proof = self._signer.authorization(method, path, said)
            head = f"{method} {path} HTTP/1.1\r\n{self._head}authorization: {proof}\r\n"
            return f"{head}content-length: {len(said)}\r\n\r\n".encode() + said

        return self._exchanged(request)

    def _exchanged(self, request: Callable[[], bytes]) -> _Reading:
        used = self._wire is not None
        try:
            return self._exchange(request())
        except ConnectionError:
            if not used or self._cut:
                raise
        self.close()  # the other end has closed it while nothing was said; what is said twice does no harm
        return self._exchange(request())

    def _exchange(self, request: bytes) -> _Reading:
        if self._wire is None:
            self._wire = self._connect()
        self._wire.sendall(request)
        reading = _Reading()
        while not reading.whole:
            data = self._wire.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError("closed before all of the answer was there")
            reading.feed(data)
        if not reading.goes_on:
            self.close()
        return reading

    def _connect(self) -> socket.socket:
        wire = socket.create_connection((self._host, self._port), self._seconds)
        try:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return self._secured(wire) if self._trust else wire
        except BaseException:
            wire.close()
            raise

    def _secured(self, wire: socket.socket) -> ssl.SSLSocket:
        assert self._trust is not None
        secured = self._trust.wrap_socket(wire, server_hostname=self._host)
        if self._pin and pin(secured.getpeercert(binary_form=True) or b"") != self._pin:
            secured.close()
            raise ssl.SSLCertVerificationError("the certificate has another fingerprint")
        return secured


class _Reading:
    """An answer as it comes.

    Attributes:
        whole: all of it is there.
        goes_on: the connection can be used again.
        challenges: the ``www-authenticate`` headers.
        proof: the server's signature.

    Raises:
        ValueError: there is more of it than is read, or it cannot be unpacked.
        httptools.HttpParserError: it is no HTTP.
    """

    def __init__(self) -> None:
        self.whole = self.goes_on = self._packed = False
        self.challenges: list[str] = []
        self.proof = ""
        self._parts: list[bytes] = []
        self._count = 0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """What came next."""
        self._count += len(data)
        if self._count > _LONGEST_ANSWER_BYTES:
            raise ValueError("an answer that is too long")
        self._parser.feed_data(data)

    @property
    def status(self) -> int:
        """HTTP's."""
        return int(self._parser.get_status_code())

    @property
    def sent(self) -> bytes:
        """The body as it came."""
        return b"".join(self._parts)

    @property
    def body(self) -> bytes:
        """Unpacked."""
        whole = self.sent
        if not self._packed:
            return whole
        try:
            return zlib.decompressobj(_GZIP).decompress(whole, _LONGEST_ANSWER_BYTES)
        except zlib.error as error:
            raise ValueError("an answer that cannot be unpacked") from error

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        match name.lower():
            case b"content-encoding":
                self._packed = value == b"gzip"
            case b"www-authenticate":
                self.challenges.append(value.decode("latin-1"))
            case b"unisono-proof":
                self.proof = value.decode("latin-1")

    def on_body(self, part: bytes) -> None:
        """Called by the parser."""
        self._parts.append(part)

    def on_message_complete(self) -> None:
        """Called by the parser, which knows only now whether the connection can be used again."""
        self.whole, self.goes_on = True, bool(self._parser.should_keep_alive())


_GZIP = 16 + zlib.MAX_WBITS


def ask(contact: CoordinatorAddress, path: str, kind: type[Body]) -> Body | None:
    """The message of that `kind` that the coordinator answers; None if it has none.

    Raises:
        InvalidInput: nobody answers, or the token is another run's.
    """
    return heard(contact, HttpConnection(contact).get(path, kind)).body


def heard(contact: CoordinatorAddress, answer: Answer[Body] | None) -> Answer[Body]:
    """`answer`, if it is one to whoever may ask.

    Raises:
        InvalidInput: else.
    """
    if answer is None:
        problem = "nobody answers there as a coordinator of this version does"
        cure = "check the address, and that the run is under way"
        if contact.secure:
            problem += ", or its certificate is not known here"
            cure += "; or give --authority FILE or its fingerprint"
        raise InvalidInput("coordinator", contact.url, problem, cure)
    if answer.status == 401:
        raise InvalidInput("token", "(not shown)", "it is not that of the coordinator", "give the one of this run")
    return answer


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


def _sayable(token: str) -> str:
    if not (token.isascii() and token.isprintable()):
        raise InvalidInput(
            "token", "(not shown)", "it has characters that are not printable ASCII", "choose another one"
        )
    return token


def _trust(authority: str, pinned: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=authority or None)
        if pinned:  # the fingerprint alone decides
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    except OSError as error:
        raise InvalidInput(
            "authority",
            authority,
            f"no certificate that can be read ({error.strerror or error})",
            "name a file in PEM format",
        ) from error
