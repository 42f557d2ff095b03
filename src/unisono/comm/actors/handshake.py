"""Who may speak with an actor: both ends prove that they know the run's token, and neither says it.

::

    server   magic, 32 random bytes
    client   32 random bytes, its number, the number of the actor it wants, HMAC("client", all of the above)
    server   the largest payload that the actor takes, how frames are protected, HMAC("server", all of the above)

Sizes are fixed, nothing else is read before, and the token never travels. The keys of what follows are made of it and
of what both have said, by HMAC too.
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
    """The other end does not know the token, or is something else altogether."""


@dataclass(frozen=True)
class ConnectionTerms:
    """What both ends keep to from now on; the server says it."""

    largest_bytes: int
    protection: Protection


@dataclass(frozen=True)
class TrustedConnection:
    """A connection after the handshake, as one end sees it."""

    wire: socket.socket
    terms: ConnectionTerms
    incoming: Direction
    outgoing: Direction


def challenge() -> bytes:
    """What a server says first."""
    return _MAGIC + secrets.token_bytes(_NONCE_BYTES)


def claim(token: bytes, challenged: bytes, sender: int, actor: int) -> bytes:
    """What a client answers. Raises `Untrusted`."""
    if not challenged.startswith(_MAGIC):
        raise Untrusted("it is not a server of this library")
    said = secrets.token_bytes(_NONCE_BYTES) + _NUMBERS.pack(sender, actor)
    return said + _proof(token, b"client", challenged + said)


def judge(token: bytes, challenged: bytes, claimed: bytes, actor: int, terms: ConnectionTerms) -> tuple[int, bytes]:
    """The client's number, and what the server answers. Raises `Untrusted`."""
    said, proof = claimed[:-_PROOF_BYTES], claimed[-_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"client", challenged + said)):
        raise Untrusted("it does not know this run's token")
    sender, wanted = _NUMBERS.unpack(said[_NONCE_BYTES:])
    if wanted != actor:
        raise Untrusted(f"it looks for actor {wanted}, this is {actor}")
    said = _TERMS.pack(terms.largest_bytes, terms.protection)
    return sender, said + _proof(token, b"server", challenged + claimed + said)


def admitted(wire: socket.socket, token: bytes, said: bytes, terms: ConnectionTerms) -> TrustedConnection:
    """The server's end of `wire`, once challenge and claim, `said`, were found to be right."""
    incoming, outgoing = _directions(token, said, terms.protection)
    return TrustedConnection(wire, terms, incoming, outgoing)


def introduce(wire: socket.socket, token: bytes, sender: int, actor: int) -> TrustedConnection:
    """The client's side, within the timeout of `wire`.

    Raises:
        Untrusted: the server does not know the token.
        OSError: the connection ended, or nothing came in time.
    """
    challenged = _exactly(wire, CHALLENGE_BYTES)
    claimed = claim(token, challenged, sender, actor)
    wire.sendall(claimed)
    said, proof = _exactly(wire, _TERMS.size), _exactly(wire, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(token, b"server", challenged + claimed + said)):
        raise Untrusted("it does not know this run's token")
    largest_bytes, protection = _TERMS.unpack(said)
    terms = ConnectionTerms(largest_bytes, Protection(protection))
    if terms.protection is Protection.NONE and wire.family != socket.AF_UNIX:
        raise Untrusted("it was reached by its local name from another host or user")
    outgoing, incoming = _directions(token, challenged + claimed, terms.protection)
    return TrustedConnection(wire, terms, incoming, outgoing)


def _directions(token: bytes, said: bytes, protection: Protection) -> tuple[Direction, Direction]:
    """From client to server, and back."""
    if protection is Protection.NONE:
        return Direction(), Direction()
    encrypted = protection is Protection.ENCRYPTED
    to_server, to_client = (_proof(token, way, said)[:KEY_BYTES] for way in (b"to the server", b"to the client"))
    return Protected(to_server, encrypted), Protected(to_client, encrypted)


def _proof(token: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(token, role + said, "sha256")


def _exactly(wire: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        piece = wire.recv(nbytes - len(found))
        if not piece:
            raise ConnectionResetError("the other end has closed the connection")
        found += piece
    return found
