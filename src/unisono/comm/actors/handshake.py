"""The handshake of a connection to an actor: both ends prove that they know the run's token, and neither sends it.

::

    server   magic, 32 random bytes
    client   32 random bytes, its number, the number of the requested actor, HMAC("client", all of the above)
    server   the largest payload that the actor takes, how frames are protected, HMAC("server", all of the above)

Sizes are fixed, and neither end reads anything else until the handshake is complete. The keys of the connection are
derived from the token and from both ends' random bytes, by HMAC too.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from dataclasses import dataclass

from unisono.comm.actors.protection import KEY_BYTES, Direction, Protected, Protection

TOKEN_BYTES = 32
_MAGIC = b"unisono2"
_NONCE_BYTES = 32
_NUMBERS = struct.Struct("<qq")
_TERMS = struct.Struct("<QB")
_PROOF_BYTES = 32
CHALLENGE_BYTES = len(_MAGIC) + _NONCE_BYTES
CLAIM_BYTES = _NONCE_BYTES + _NUMBERS.size + _PROOF_BYTES


class Untrusted(ConnectionError):
    """The other end does not know the token, or does not speak this protocol."""


@dataclass(frozen=True)
class ConnectionTerms:
    """What the server decides about a connection: its largest payload, and how its frames are protected."""

    largest_bytes: int
    protection: Protection


@dataclass(frozen=True)
class TrustedConnection:
    """A connection after the handshake, as one end sees it."""

    sock: socket.socket
    terms: ConnectionTerms
    incoming: Direction
    outgoing: Direction


def challenge() -> bytes:
    """The first message, from the server."""
    return _MAGIC + secrets.token_bytes(_NONCE_BYTES)


def claim(token: bytes, challenge_bytes: bytes, sender: int, actor: int) -> bytes:
    """The client's answer to a challenge. Raises `Untrusted`."""
    if not challenge_bytes.startswith(_MAGIC):
        raise Untrusted("it is not a server of this library")
    request = secrets.token_bytes(_NONCE_BYTES) + _NUMBERS.pack(sender, actor)
    return request + _proof(token, b"client", challenge_bytes + request)


def verify(
    token: bytes, challenge_bytes: bytes, claim_bytes: bytes, actor: int, terms: ConnectionTerms
) -> tuple[int, bytes]:
    """The client's number, and the server's answer to its claim. Raises `Untrusted`."""
    request, proof = claim_bytes[:-_PROOF_BYTES], claim_bytes[-_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"client", challenge_bytes + request)):
        raise Untrusted("it does not know this run's token")
    sender, wanted = _NUMBERS.unpack(request[_NONCE_BYTES:])
    if wanted != actor:
        raise Untrusted(f"it looks for actor {wanted}, this is {actor}")
    answer = _TERMS.pack(terms.largest_bytes, terms.protection)
    return sender, answer + _proof(token, b"server", challenge_bytes + claim_bytes + answer)


def accepted(sock: socket.socket, token: bytes, transcript: bytes, terms: ConnectionTerms) -> TrustedConnection:
    """The server's end of `sock`, after `verify`; `transcript` is the challenge and the claim."""
    incoming, outgoing = _directions(token, transcript, terms.protection)
    return TrustedConnection(sock, terms, incoming, outgoing)


def authenticate(sock: socket.socket, token: bytes, sender: int, actor: int) -> TrustedConnection:
    """The client's side of the handshake, within the timeout of `sock`.

    Raises:
        Untrusted: the server does not know the token; or it treats this connection over TCP as a local one, as it does
            when a process of its host relays the connection.
        OSError: the connection ended, or timed out.
    """
    challenge_bytes = _receive_exactly(sock, CHALLENGE_BYTES)
    claim_bytes = claim(token, challenge_bytes, sender, actor)
    sock.sendall(claim_bytes)
    answer, proof = _receive_exactly(sock, _TERMS.size), _receive_exactly(sock, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(token, b"server", challenge_bytes + claim_bytes + answer)):
        raise Untrusted("it does not know this run's token")
    largest_bytes, protection = _TERMS.unpack(answer)
    terms = ConnectionTerms(largest_bytes, Protection(protection))
    if terms.protection is Protection.NONE and sock.family != socket.AF_UNIX:
        raise Untrusted("this connection is over TCP, but its other end is a local one: another process relays it")
    outgoing, incoming = _directions(token, challenge_bytes + claim_bytes, terms.protection)
    return TrustedConnection(sock, terms, incoming, outgoing)


def _directions(token: bytes, transcript: bytes, protection: Protection) -> tuple[Direction, Direction]:
    """The directions from client to server, and from server to client."""
    if protection is Protection.NONE:
        return Direction(), Direction()
    encrypted = protection is Protection.ENCRYPTED
    to_server, to_client = (_proof(token, way, transcript)[:KEY_BYTES] for way in (b"to the server", b"to the client"))
    return Protected(to_server, encrypted), Protected(to_client, encrypted)


def _proof(token: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(token, role + transcript, "sha256")


def _receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    received = b""
    while len(received) < nbytes:
        part = sock.recv(nbytes - len(received))
        if not part:
            raise ConnectionResetError("the other end has closed the connection")
        received += part
    return received
