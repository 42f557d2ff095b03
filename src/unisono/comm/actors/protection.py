"""Authentication and encryption of the frames of a connection.

Between processes of one user on one host the kernel protects frames: no other process reaches the other end of a Unix
socket. On any other connection each frame is authenticated, and encrypted if the run asks for it, by AES-128-GCM (NIST
SP 800-38D). A frame with at most 32 KiB of payload is one segment. Of a larger frame, the first segment is head, table
and text, and each further one is 1 MiB of payload or the rest of it. A tag of 16 bytes follows each segment. The head
is never encrypted, as it holds the sizes. A segment's nonce is its number on the connection, so no segment can be left
out, repeated or moved. Each direction has its own key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum

from unisono.comm.actors import wire_format
from unisono.comm.actors.wire_format import HEAD_BYTES, BrokenMessage

SEGMENT_BYTES = 1 << 20
SINGLE_BYTES = 1 << 15
TAG_BYTES = 16
KEY_BYTES = 16
_NONCE_BYTES = 12


class Protection(IntEnum):
    """How the frames of a connection are protected; the handshake sends the numbers."""

    NONE = 0
    AUTHENTICATED = 1
    ENCRYPTED = 2


class Direction:
    """Protects or opens the frames of one direction of a connection, in the order in which they are sent.

    This base class leaves frames as they are.

    Attributes:
        tag_bytes: size of the tag that follows each segment.
        single_bytes: a payload of at most this size is part of the first segment.
        segment_bytes: payload bytes of each further segment.
    """

    tag_bytes = single_bytes = 0
    segment_bytes = wire_format.LARGEST_BYTES << 10

    def protect(self, pieces: list[memoryview]) -> Iterator[list[memoryview]]:
        """The frame of `pieces` after protection, in parts; each part is computed when it is requested."""
        yield pieces

    def open(self, segment: memoryview, head: bytes = b"") -> memoryview:
        """Verify `segment`, which ends with its tag, and decrypt it in place if encrypted; returns it without the tag.

        Args:
            head: the head of the frame, if `segment` is the frame's first one.

        Raises:
            BrokenMessage: the segment is not the one that was sent.
        """
        return segment


class Protected(Direction):
    """A `Direction` that authenticates its frames, and also encrypts them if `encrypted`; `key` has 16 bytes."""

    tag_bytes, single_bytes, segment_bytes = TAG_BYTES, SINGLE_BYTES, SEGMENT_BYTES

    def __init__(self, key: bytes, encrypted: bool) -> None:
        # The import takes 25 ms, and only workers of several hosts need it.
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher, self._invalid, self._encrypted, self._count = AESGCM(key), InvalidTag, encrypted, 0

    def protect(self, pieces: list[memoryview]) -> Iterator[list[memoryview]]:
        first, *payload = pieces if wire_format.nbytes(pieces[1:]) > self.single_bytes else [_joined(pieces)]
        head, rest = first[:HEAD_BYTES], first[HEAD_BYTES:]
        if self._encrypted:
            yield [head, self._encrypt(rest, head)]
        else:
            yield [first, self._tag(first)]
        for segment in _segments(payload, self.segment_bytes):
            yield [self._encrypt(segment, b"")] if self._encrypted else [segment, self._tag(segment)]

    def open(self, segment: memoryview, head: bytes = b"") -> memoryview:
        clear, tag = segment[:-TAG_BYTES], segment[-TAG_BYTES:]
        try:
            if self._encrypted:
                self._cipher.decrypt_into(self._nonce(), segment, head, clear)
            else:
                self._cipher.decrypt(self._nonce(), tag, head + bytes(clear) if head else clear)
        except self._invalid:
            raise BrokenMessage("a part of it was altered, repeated or left out on the way") from None
        return clear

    def _encrypt(self, data: memoryview, head: memoryview | bytes) -> memoryview:
        return memoryview(self._cipher.encrypt(self._nonce(), data, head))

    def _tag(self, data: memoryview) -> memoryview:
        return memoryview(self._cipher.encrypt(self._nonce(), b"", data))

    def _nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(_NONCE_BYTES, "big")


def _segments(pieces: Sequence[memoryview], nbytes: int) -> Iterator[memoryview]:
    """The bytes of `pieces` in parts of `nbytes` and one of the rest; copies only parts that span several pieces."""
    waiting: list[memoryview] = []
    room = nbytes
    for piece in pieces:
        while len(piece) >= room:
            yield _joined([*waiting, piece[:room]])
            piece, waiting, room = piece[room:], [], nbytes
        if piece:
            waiting.append(piece)
            room -= len(piece)
    if waiting:
        yield _joined(waiting)


def _joined(pieces: list[memoryview]) -> memoryview:
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
