"""Who may speak with an actor: both ends prove that they know the run's token, and neither says it.

::

    server   magic, 32 random bytes
    client   32 random bytes, its number, the number of the actor it wants, HMAC("client", all of the above)
    server   the largest payload that the actor takes, HMAC("server", all of the above)

Sizes are fixed, nothing else is read before, and the token never travels.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct

TOKEN_BYTES = 32
_MAGIC = b"unisono1"
_NONCE_BYTES = 32
_NUMBERS = struct.Struct("<qq")
_LARGEST = struct.Struct("<Q")
_PROOF_BYTES = 32
CHALLENGE_BYTES = len(_MAGIC) + _NONCE_BYTES
CLAIM_BYTES = _NONCE_BYTES + _NUMBERS.size + _PROOF_BYTES


class Untrusted(ConnectionError):
    """The other end does not know the token, or is something else altogether."""


def challenge() -> bytes:
    """What a server says first."""
    return _MAGIC + secrets.token_bytes(_NONCE_BYTES)


def claim(token: bytes, challenged: bytes, sender: int, actor: int) -> bytes:
    """What a client answers. Raises `Untrusted`."""
    if not challenged.startswith(_MAGIC):
        raise Untrusted("it is not a server of this library")
    said = secrets.token_bytes(_NONCE_BYTES) + _NUMBERS.pack(sender, actor)
    return said + _proof(token, b"client", challenged + said)


def judge(token: bytes, challenged: bytes, claimed: bytes, actor: int, largest_bytes: int) -> tuple[int, bytes]:
    """The client's number, and what the server answers. Raises `Untrusted`."""
    said, proof = claimed[:-_PROOF_BYTES], claimed[-_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"client", challenged + said)):
        raise Untrusted("it does not know this run's token")
    sender, wanted = _NUMBERS.unpack(said[_NONCE_BYTES:])
    if wanted != actor:
        raise Untrusted(f"it looks for actor {wanted}, this is {actor}")
    largest = _LARGEST.pack(largest_bytes)
    return sender, largest + _proof(token, b"server", challenged + claimed + largest)


def introduce(wire: socket.socket, token: bytes, sender: int, actor: int) -> int:
    """The client's side, within the timeout of `wire`; returns the largest payload that the actor takes.

    Raises:
        Untrusted: the server does not know the token.
        OSError: the connection ended, or nothing came in time.
    """
    challenged = _exactly(wire, CHALLENGE_BYTES)
    claimed = claim(token, challenged, sender, actor)
    wire.sendall(claimed)
    largest, proof = _exactly(wire, _LARGEST.size), _exactly(wire, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(token, b"server", challenged + claimed + largest)):
        raise Untrusted("it does not know this run's token")
    return int(_LARGEST.unpack(largest)[0])


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
