"""Mutual authentication of a coordinator and its clients by the run's token, which is never sent.

::

    client   GET /v1/challenge
    server   401, www-authenticate: Unisono <challenge>
    client   authorization: Unisono <challenge> <client> <count> <SHA-256 of the body> <proof>
    server   unisono-proof: <proof>

A proof is HMAC-SHA-256 under a key that is derived from the token; each direction has its own key. The proof of a
request covers its method, its path, and everything before the proof. The proof of a response covers its status and
body, and the client and count of the request. A challenge belongs to one server process, and a client counts its
requests: so a replayed request is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

SCHEME = "Unisono"
CHALLENGE_PATH = "/v1/challenge"
PROOF_HEADER = "unisono-proof"
_MAX_CLIENTS = 1 << 16  # whose counts are remembered


@dataclass(frozen=True)
class SignedRequest:
    """A request whose head was verified: the client's id, its request count, and the SHA-256 of the body to come."""

    client: str
    count: int
    digest: str


class RequestSigner:
    """The client's side of one connection: signs requests, and verifies the signatures of responses."""

    def __init__(self, token: str) -> None:
        self._keys, self._challenge = _keys(token), [""]
        self._client, self._count = secrets.token_hex(8), 0

    def sibling(self) -> RequestSigner:
        """A signer for another connection to the same server, with an id of its own, but with the same challenge."""
        other = RequestSigner.__new__(RequestSigner)
        other._keys, other._challenge = self._keys, self._challenge
        other._client, other._count = secrets.token_hex(8), 0
        return other

    @property
    def challenge(self) -> str:
        """The server's challenge; empty until it is known."""
        return self._challenge[0]

    def authorization(self, method: str, path: str, body: bytes) -> str:
        """The value of the ``authorization`` header of the next request."""
        self._count += 1
        claim = f"{self.challenge} {self._client} {self._count} {hashlib.sha256(body).hexdigest()}"
        return f"{SCHEME} {claim} {_proof(self._keys[0], method, path, claim)}"

    def verifies(self, status: int, body: bytes, proof: str) -> bool:
        """Whether the response to the latest request was signed with the token."""
        digest = hashlib.sha256(body).hexdigest()
        expected = _proof(self._keys[1], self._client, str(self._count), str(status), digest)
        return hmac.compare_digest(proof.encode("utf-8", "replace"), expected.encode())

    def accept_challenge(self, header: str) -> bool:
        """Take the challenge from a ``www-authenticate`` header; returns whether it holds one."""
        scheme, _, challenge = header.partition(" ")
        if scheme != SCHEME or not (challenge.isascii() and challenge.isalnum() and len(challenge) <= 64):
            return False
        self._challenge[0] = challenge
        return True


class RequestVerifier:
    """The server's side: verifies the signatures of requests, and signs responses.

    Attributes:
        challenge: a random text, drawn at the start, and again when more clients come than can be remembered.
    """

    def __init__(self, token: str) -> None:
        self._request, self._response = _keys(token)
        self._begin()

    def _begin(self) -> None:
        self.challenge = secrets.token_hex(16)
        self._counts: dict[str, int] = {}

    def verify(self, method: str, path: str, authorization: str) -> SignedRequest | None:
        """The verified head of a request; None if its signature is wrong or it is a replay."""
        words = authorization.split(" ")
        if len(words) != 6 or words[0] != SCHEME or not authorization.isascii():
            return None
        _, challenge, client, count, digest, proof = words
        expected = _proof(self._request, method, path, f"{challenge} {client} {count} {digest}")
        if not hmac.compare_digest(proof, expected) or challenge != self.challenge:
            return None
        if not (count.isdecimal() and len(count) < 20) or int(count) <= self._counts.get(client, 0):
            return None
        if client not in self._counts and len(self._counts) >= _MAX_CLIENTS:
            self._begin()
            return None
        self._counts[client] = int(count)
        return SignedRequest(client, int(count), digest)

    def proof(self, claim: SignedRequest, status: int, digest: str) -> str:
        """The signature of the response to the request `claim`; `digest` is the SHA-256 of the response's body."""
        return _proof(self._response, claim.client, str(claim.count), str(status), digest)


def _keys(token: str) -> tuple[bytes, bytes]:
    derived = [hmac.digest(token.encode(), f"unisono {of}".encode(), "sha256") for of in ("request", "answer")]
    return derived[0], derived[1]


def _proof(key: bytes, *parts: str) -> str:
    return hmac.digest(key, "\n".join(parts).encode(), "sha256").hex()
