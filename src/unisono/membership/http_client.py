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
from unisono.membership.proof import CHALLENGE_PATH, RequestSigner
from unisono.membership.protocol import CoordinatorAddress

_MAX_RESPONSE_BYTES = 16 << 20
_READ_BYTES = 1 << 16
Body = TypeVar("Body", bound=BaseModel)


class EmptyBody(BaseModel):
    """The body of a response of which only the status is needed."""


@dataclass(frozen=True)
class HttpResponse(Generic[Body]):
    """A response: its HTTP status, and its message, `body`, which is None with any status but 200."""

    status: int
    body: Body | None


class HttpConnection:
    """A keep-alive connection to the coordinator, opened and reopened when needed.

    Every wakeup of a worker or coordinator delays training steps. So a request is one packet, for which the other end
    wakes up once, and a parser in C reads the response.

    Args:
        contact: how to reach the coordinator.
        timeout_seconds: how long to wait for a response.

    Attributes:
        refused: whether the last request failed because the connection was refused.

    Raises:
        InvalidInput: the contact's URL is invalid, its token is not printable, or its authority cannot be read.
    """

    def __init__(self, contact: CoordinatorAddress, timeout_seconds: float = 10.0) -> None:
        self.refused = self._cancelled = False
        self._host, self._port, secure = _address(contact.url)
        self._timeout_seconds = timeout_seconds
        self._pin = contact.authority if secure and is_pin(contact.authority) else ""
        self._trust = _trust("" if self._pin else contact.authority, bool(self._pin)) if secure else None
        self._head = (
            f"host: {urlsplit(contact.url).netloc.rpartition('@')[2]}\r\n"
            "content-type: application/json\r\naccept-encoding: gzip\r\n"
        )
        self._signer = RequestSigner(_printable(contact.token))
        self._socket: socket.socket | None = None

    def sibling(self) -> HttpConnection:
        """Another connection to the same coordinator; both use the challenge that either has received."""
        other = copy.copy(self)
        other.refused = other._cancelled = False
        other._signer, other._socket = self._signer.sibling(), None
        return other

    def get(self, path: str, kind: type[Body]) -> HttpResponse[Body] | None:
        """Send a GET request; see `request`."""
        return self.request("GET", path, None, kind)

    def post(self, path: str, message: object, kind: type[Body]) -> Body | None:
        """Send a POST request; returns the response's message, or None if there is none. See `request`."""
        response = self.request("POST", path, message, kind)
        return response.body if response else None

    def request(self, method: str, path: str, message: object, kind: type[Body]) -> HttpResponse[Body] | None:
        """Send a request; returns the response, or None if there is none, or if its message is not of the type `kind`.

        Args:
            message: what to send as JSON; None: the request has no body; bytes: they are JSON already.
        """
        body = message if isinstance(message, bytes) else b"" if message is None else json.dumps(message).encode()
        try:
            response = self._verified(method, path, body)
            self.refused = False
            decoded = kind.model_validate_json(response.body) if response.status == 200 else None
            return HttpResponse(response.status, decoded)
        except (OSError, ValueError, httptools.HttpParserError) as error:
            self.refused = isinstance(error, ConnectionRefusedError)
            self.close()
            return None

    def cancel(self) -> None:
        """Fail the request in flight, and all later ones. Any thread may call this."""
        self._cancelled, connection = True, self._socket
        if connection is not None:
            with suppress(OSError):  # not connected any more
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; a later request opens it again."""
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def _verified(self, method: str, path: str, body: bytes) -> _ResponseReader:
        """A response whose signature is valid, or one of status 401.

        Raises:
            ValueError: the response is not signed with the token.
        """
        known = bool(self._signer.challenge)
        if not known:
            self._fetch_challenge()
        response = self._signed(method, path, body)
        if response.status == 401 and known:  # the coordinator was restarted
            self._fetch_challenge()
            response = self._signed(method, path, body)
        if response.status != 401 and not self._signer.verifies(response.status, response.sent, response.proof):
            raise ValueError("a response that is not signed with the token")
        return response

    def _fetch_challenge(self) -> None:
        request = f"GET {CHALLENGE_PATH} HTTP/1.1\r\n{self._head}content-length: 0\r\n\r\n".encode()
        response = self._send(lambda: request)
        if not any(self._signer.accept_challenge(challenge) for challenge in response.challenges):
            raise ValueError("no coordinator of this version")

    def _signed(self, method: str, path: str, body: bytes) -> _ResponseReader:
        def request() -> bytes:
            proof = self._signer.authorization(method, path, body)
            head = f"{method} {path} HTTP/1.1\r\n{self._head}authorization: {proof}\r\n"
            return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

        return self._send(request)

    def _send(self, request: Callable[[], bytes]) -> _ResponseReader:
        reused = self._socket is not None
        try:
            return self._exchange(request())
        except ConnectionError:
            if not reused or self._cancelled:
                raise
        self.close()  # the other end closed the idle connection; if the request arrives twice, this does no harm
        return self._exchange(request())

    def _exchange(self, request: bytes) -> _ResponseReader:
        if self._socket is None:
            self._socket = self._connect()
        self._socket.sendall(request)
        reader = _ResponseReader()
        while not reader.complete:
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError("the connection was closed before the response was complete")
            reader.feed(data)
        if not reader.keep_alive:
            self.close()
        return reader

    def _connect(self) -> socket.socket:
        connection = socket.create_connection((self._host, self._port), self._timeout_seconds)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return self._secured(connection) if self._trust else connection
        except BaseException:
            connection.close()
            raise

    def _secured(self, connection: socket.socket) -> ssl.SSLSocket:
        assert self._trust is not None
        secured = self._trust.wrap_socket(connection, server_hostname=self._host)
        if self._pin and pin(secured.getpeercert(binary_form=True) or b"") != self._pin:
            secured.close()
            raise ssl.SSLCertVerificationError("the certificate does not have the expected fingerprint")
        return secured


class _ResponseReader:
    """Parses a response as it arrives.

    Attributes:
        complete: whether the whole response has arrived.
        keep_alive: whether the connection can be used again.
        challenges: the ``www-authenticate`` headers.
        proof: the server's signature.

    Raises:
        ValueError: the response is too long, or cannot be decompressed.
        httptools.HttpParserError: the response is not HTTP.
    """

    def __init__(self) -> None:
        self.complete = self.keep_alive = self._compressed = False
        self.challenges: list[str] = []
        self.proof = ""
        self._parts: list[bytes] = []
        self._count = 0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Parse the next bytes."""
        self._count += len(data)
        if self._count > _MAX_RESPONSE_BYTES:
            raise ValueError("a response that is too long")
        self._parser.feed_data(data)

    @property
    def status(self) -> int:
        """The HTTP status."""
        return int(self._parser.get_status_code())

    @property
    def sent(self) -> bytes:
        """The body as it arrived, perhaps compressed."""
        return b"".join(self._parts)

    @property
    def body(self) -> bytes:
        """The body, decompressed."""
        if not self._compressed:
            return self.sent
        try:
            return zlib.decompressobj(_GZIP).decompress(self.sent, _MAX_RESPONSE_BYTES)
        except zlib.error as error:
            raise ValueError("a response that cannot be decompressed") from error

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        match name.lower():
            case b"content-encoding":
                self._compressed = value == b"gzip"
            case b"www-authenticate":
                self.challenges.append(value.decode("latin-1"))
            case b"unisono-proof":
                self.proof = value.decode("latin-1")

    def on_body(self, part: bytes) -> None:
        """Called by the parser."""
        self._parts.append(part)

    def on_message_complete(self) -> None:
        """Called by the parser, which knows only now whether the connection can be used again."""
        self.complete, self.keep_alive = True, bool(self._parser.should_keep_alive())


_GZIP = 16 + zlib.MAX_WBITS


def fetch(contact: CoordinatorAddress, path: str, kind: type[Body]) -> Body | None:
    """Request a message of the type `kind` from the coordinator; returns None if the coordinator has none.

    Raises:
        InvalidInput: the coordinator does not respond, or the token is wrong.
    """
    return check_response(contact, HttpConnection(contact).get(path, kind)).body


def check_response(contact: CoordinatorAddress, response: HttpResponse[Body] | None) -> HttpResponse[Body]:
    """Return `response`.

    Raises:
        InvalidInput: there is no response, or the coordinator has refused the token.
    """
    if response is None:
        problem = "no coordinator of this version responds there"
        cure = "check the address, and that the run has not ended"
        if contact.uses_tls:
            problem += ", or its certificate is not known here"
            cure += "; or give --authority FILE or its fingerprint"
        raise InvalidInput("coordinator", contact.url, problem, cure)
    if response.status == 401:
        raise InvalidInput("token", "(not shown)", "the coordinator has another token", "give the token of this run")
    return response


def _address(url: str) -> tuple[str, int, bool]:
    wrong = InvalidInput("coordinator", url, "is not the address of a coordinator", "write http://host:port")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise wrong
    return parts.hostname, port, parts.scheme == "https"


def _printable(token: str) -> str:
    if not (token.isascii() and token.isprintable()):
        raise InvalidInput(
            "token", "(not shown)", "has characters that are not printable ASCII", "choose another token"
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
            f"is not a readable certificate ({error.strerror or error})",
            "name a file in PEM format",
        ) from error
