"""A meeting place that strangers reach: what lies there can be read and written by those only who know the token.

A value is sealed by HMAC-SHA-256 of its key and the encrypted value (encrypt, then authenticate); the stream that
encrypts it is HMAC-SHA-256 of a nonce and a counter, under another key. Values are addresses and a few words.
"""

from __future__ import annotations

import hmac
import secrets
import time
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d

from unisono.backoff import Backoff

_NONCE_BYTES = 16
_DIGEST_BYTES = 32
_LARGEST_BYTES = 1 << 20
_BACKOFF = Backoff(first_seconds=1e-3, factor=1.5, longest_seconds=20e-3)


class Sealed(c10d.Store):
    """`store`, for who knows `token`: a value that nobody who knows it has written is not there.

    Args:
        about: what meets there. A value of another meeting is none of this one.
        deadline_seconds: how long a key may take to come.
    """

    def __init__(self, store: c10d.Store, token: str, about: str, deadline_seconds: float) -> None:
        super().__init__()
        self._store, self._deadline_seconds = store, deadline_seconds
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
        """As torch's. Raises `RuntimeError` where nothing comes before the deadline."""
        self.wait([key])
        found = self._opened(key)
        assert found is not None
        return found

    def check(self, keys: list[str]) -> bool:
        """As torch's."""
        return all(self._opened(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """As torch's."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else self._deadline_seconds
        until, attempt = time.monotonic() + seconds, 0
        while not self.check(keys):
            if time.monotonic() > until:
                raise RuntimeError(f"{', '.join(keys)} did not come within {seconds:g} s")
            time.sleep(_BACKOFF.seconds(attempt))
            attempt += 1

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
        """Hidden, or shown again."""
        count = -(-len(value) // _DIGEST_BYTES)
        stream = b"".join(hmac.digest(self._hide, nonce + i.to_bytes(4), "sha256") for i in range(count))
        return bytes(a ^ b for a, b in zip(value, stream))
