"""The wire format of messages to actors, without I/O::

    head      magic, bytes of text, number of tensors, number of the call, bytes of payload
    table     for each tensor its dtype and number of elements
    text      JSON: the kind and the fields
    payload   the tensors as they are in memory, each padded to 8 bytes

A reader knows the size of a message after 32 bytes, and refuses it before allocating memory for it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pydantic_core import PydanticSerializationError, from_json, to_json
from torch import Tensor

from unisono.comm.actor import ActorMessage
from unisono.comm.header_record import DTYPES as DTYPES

_MAGIC = b"uni2"
_HEAD = struct.Struct("<4sIIxxxxQQ")
_ROW = struct.Struct("<B7xQ")
_PADDING = bytes(8)
_TAG_BYTES = 16
HEAD_BYTES = _HEAD.size
LARGEST_TEXT_BYTES = 1 << 20
MOST_TENSORS = 1 << 14
LARGEST_BYTES = 1 << 30
"""The largest payload that an actor takes, unless the actor has an attribute `largest_bytes`."""

_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_MEMORYVIEW_DTYPES = {x for x in DTYPES if not x.is_complex and x.itemsize > 1 and x != torch.bfloat16}
_MEMORYVIEW_DTYPES |= {torch.int8, torch.uint8, torch.bool}
"""Dtypes whose memory Python's `memoryview` can show as bytes."""


class BrokenMessage(ValueError):
    """The data that arrived is not a message, or is larger than allowed."""


class Head(NamedTuple):
    """The first bytes of a message."""

    call: int
    text_bytes: int
    tensors: int
    payload_bytes: int

    @property
    def table_bytes(self) -> int:
        return self.tensors * _ROW.size

    @staticmethod
    def parse(data: bytes, largest_bytes: int) -> Head:
        """Raises `BrokenMessage` if the data is no head, or announces more than is allowed."""
        magic, text_bytes, tensors, call, payload_bytes = _HEAD.unpack(data)
        if magic != _MAGIC:
            raise BrokenMessage(f"it begins with {bytes(magic)!r}, not with {_MAGIC!r}")
        if text_bytes > LARGEST_TEXT_BYTES or tensors > MOST_TENSORS or payload_bytes > largest_bytes:
            raise BrokenMessage(
                f"it announces {text_bytes} bytes of text, {tensors} tensors and {payload_bytes} bytes of payload; "
                f"at most {LARGEST_TEXT_BYTES}, {MOST_TENSORS} and {largest_bytes} are taken"
            )
        return Head(call, text_bytes, tensors, payload_bytes)


Table = tuple[tuple[torch.dtype, int], ...]


def parse_table(head: Head, data: memoryview) -> Table:
    """Dtype and number of elements of each tensor. Raises `BrokenMessage` unless they account for the whole payload."""
    table: list[tuple[torch.dtype, int]] = []
    total = 0
    for code, numel in _ROW.iter_unpack(data):
        if code >= len(DTYPES):
            raise BrokenMessage(f"it has a tensor of dtype number {code}, which is not known")
        table.append((DTYPES[code], numel))
        total += _padded(numel * DTYPES[code].itemsize)
    if total != head.payload_bytes:
        raise BrokenMessage(f"its tensors have {total} bytes, its payload {head.payload_bytes}")
    return tuple(table)


def text_of(message: ActorMessage) -> bytes:
    """Kind and fields as JSON.

    Raises:
        TypeError: JSON cannot represent a field.
    """
    try:
        return to_json([message.kind, dict(message.fields)])
    except PydanticSerializationError as error:
        raise TypeError(f"a field of the message {message.kind!r} cannot be written as JSON: {error}") from error


def parse_text(data: bytes) -> tuple[str, dict[str, Any]]:
    """Kind and fields, from JSON. Raises `BrokenMessage`."""
    try:
        text = from_json(data)
    except ValueError as error:
        raise BrokenMessage(f"its text is not JSON ({type(error).__name__})") from error
    if isinstance(text, list) and len(text) == 2:  # a `match` takes three times as long
        kind, fields = text
        if isinstance(kind, str) and isinstance(fields, dict):
            return kind, fields
    raise BrokenMessage("its text is not a kind with fields")


class Buffer:
    """Memory for a payload of `nbytes`, and the payload's tensors; `bytes` has room for a tag after the payload."""

    __slots__ = ("_table", "_tensors", "bytes", "memory", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = torch.empty(nbytes + _TAG_BYTES if nbytes else 0, dtype=torch.uint8)
        self.bytes: memoryview = self.memory.numpy().data if nbytes else memoryview(b"")
        self._table: Table = ()
        self._tensors: list[Tensor] = []

    def cut(self, table: Table) -> list[Tensor]:
        """The tensors of `table` in this memory, one after the other; the previous objects if the table is the same."""
        if table != self._table:
            self._table, self._tensors = table, self._cut(table)
        return list(self._tensors)

    def _cut(self, table: Table) -> list[Tensor]:
        tensors, start = [], 0
        for dtype, numel in table:
            nbytes = numel * dtype.itemsize
            tensors.append(self.memory[start : start + nbytes].view(dtype) if numel else torch.empty(0, dtype=dtype))
            start += _padded(nbytes)
        return tensors


def encode(message: ActorMessage, call: int = 0) -> list[memoryview]:
    """The bytes of `message`, in pieces. The bytes of its tensors are not copied.

    Raises:
        TypeError: JSON cannot represent a field.
        KeyError: a tensor has a dtype that is not in `DTYPES`.
    """
    rows, payload, payload_bytes = [], [], 0
    for x in map(_flat, message.tensors):
        size, padding = x.nbytes, -x.nbytes % 8
        rows.append(_ROW.pack(_DTYPE_CODES[x.dtype], x.numel()))
        if size:
            payload.append(_bytes(x))
        if padding:
            payload.append(memoryview(_PADDING)[:padding])
        payload_bytes += size + padding
    text = text_of(message)
    head = _HEAD.pack(_MAGIC, len(text), len(rows), call, payload_bytes)
    return [memoryview(b"".join((head, *rows, text))), *payload]


def nbytes(pieces: Sequence[memoryview]) -> int:
    """The number of bytes in `pieces`."""
    return sum(map(len, pieces))


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 1 and x.is_contiguous() and not x.requires_grad else x.detach().reshape(-1)


def _bytes(x: Tensor) -> memoryview:
    """The memory of `x`, one-dimensional and contiguous."""
    readable = x if x.dtype in _MEMORYVIEW_DTYPES else x.view(torch.uint8)  # a view doubles the cost of this function
    return readable.numpy().data.cast("B")


def _padded(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of the largest dtype."""
    return -(-nbytes // 8) * 8
