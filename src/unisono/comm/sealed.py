"""A store whose values are encrypted and authenticated, for a rendezvous that other hosts can reach.

Encrypt-then-MAC: a value is encrypted by a keystream, HMAC-SHA-256 of a nonce and a counter. A second HMAC-SHA-256,
under another key, covers the store's key and the ciphertext. Both keys are derived from the run's token.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Any

from torch._C import _distributed_c10d as c10d

from unisono.comm.abort import Abort
from unisono.comm.notices import await_keys

_NONCE_BYTES = 16
_DIGEST_BYTES = 32
_LARGEST_BYTES = 1 << 20


class Sealed(c10d.Store):
    """`store` with authenticated values: a value that does not verify under `token` does not exist.

    Args:
        about: names this rendezvous; values of another one do not verify.
        deadline_seconds: how long `get` and `wait` wait for a key.
        abort: ends that waiting.
    """

    def __init__(self, store: c10d.Store, token: str, about: str, deadline_seconds: float, abort: Abort) -> None:
        super().__init__()
        self._store, self._deadline_seconds, self._abort = store, deadline_seconds, abort
        self._hide, self._sign = (
            hmac.digest(token.encode(), f"unisono meeting, {of}: {about}".encode(), "sha256") for of in ("hide", "sign")
        )

    def set(self, key: str, value: Any) -> None:
        """As torch's."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        hidden = self._turned(nonce, value.encode() if isinstance(value, str) else bytes(value))
        sealed: Any = nonce + hidden + self._mark(key, nonce + hidden)  # the stubs know of text only
        self._store.set(key, sealed)

    def get(self, key: str) -> bytes:
        """As torch's. Raises `PeerLost` where no valid value comes before the deadline."""
        self.wait([key])
        found = self._opened(key)
        assert found is not None
        return found

    def check(self, keys: list[str]) -> bool:
        """As torch's."""
        return all(self._opened(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """As torch's, but that the deadline is this store's own."""
        await_keys(self, [(-1, key) for key in keys], self._deadline_seconds, self._abort)

    def _opened(self, key: str) -> bytes | None:
        if not self._store.check([key]):
            return None
        found = self._store.get(key)
        if not _NONCE_BYTES + _DIGEST_BYTES <= len(found) <= _LARGEST_BYTES:
            return None
        sealed, mark = found[:-_DIGEST_BYTES], found[-_DIGEST_BYTES:]
        if not hmac.compare_digest(mark, self._mark(key, sealed)):
            return None
        return self._turned(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:])

    def _mark(self, key: str, sealed: bytes) -> bytes:
        return hmac.digest(self._sign, key.encode() + b"\0" + sealed, "sha256")

    def _turned(self, nonce: bytes, value: bytes) -> bytes:
        """Encrypted or decrypted: the keystream is its own inverse."""
        count = -(-len(value) // _DIGEST_BYTES)
        stream = b"".join(hmac.digest(self._hide, nonce + i.to_bytes(4), "sha256") for i in range(count))
        return bytes(a ^ b for a, b in zip(value, stream))
