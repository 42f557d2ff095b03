"""Messages as bytes: they are decoded as they were encoded, and invalid ones are refused."""

from __future__ import annotations

import math

import pytest
import torch

from unisono.comm import ActorMessage
from unisono.comm.actors.wire_format import (
    DTYPES,
    HEAD_BYTES,
    BrokenMessage,
    Buffer,
    Head,
    encode,
    parse_table,
    parse_text,
)

FIELDS = (
    {},
    {"step": 1, "far": 1 << 80, "back": -1},
    {"loss": 0.1, "least": 5e-324, "none": None, "yes": True},
    {"words": 'ä "quoted" \\ \n \0', "deep": [[1, {"a": []}]]},
)


@pytest.mark.parametrize("fields", FIELDS)
def test_fields_come_back(fields: dict) -> None:
    (text,) = encode(ActorMessage("push", fields))
    head = Head.parse(text[:HEAD_BYTES], 0)
    assert parse_text(bytes(text[HEAD_BYTES:])) == ("push", fields)
    assert (head.text_bytes, head.tensors, head.payload_bytes) == (len(text) - HEAD_BYTES, 0, 0)


def test_what_is_no_number_comes_back() -> None:
    (text,) = encode(ActorMessage("push", {"loss": [math.nan, math.inf, -math.inf]}))
    _, fields = parse_text(bytes(text[HEAD_BYTES:]))
    assert math.isnan(fields["loss"][0])
    assert fields["loss"][1:] == [math.inf, -math.inf]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_tensors_come_back_to_the_bit(dtype: torch.dtype, count: int) -> None:
    x = torch.arange(1, count + 1).to(dtype)
    whole = memoryview(b"".join(encode(ActorMessage("push", {}, [x, x]))))
    head = Head.parse(whole[:HEAD_BYTES], 1 << 10)
    table = parse_table(head, whole[HEAD_BYTES:][: head.table_bytes])
    buffer = Buffer(head.payload_bytes)
    if buffer.nbytes:
        buffer.bytes[: buffer.nbytes] = whole[HEAD_BYTES + head.table_bytes + head.text_bytes :]
    for found in buffer.cut(table):
        assert found.dtype is dtype
        assert found.view(torch.uint8).tolist() == x.view(torch.uint8).tolist()


@pytest.mark.parametrize(
    "value", [object(), torch.ones(1), b"\xff", "\ud800"], ids=["object", "tensor", "bytes", "half"]
)
def test_a_field_that_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="'push' cannot be written as JSON"):
        encode(ActorMessage("push", {"x": value}))


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff", b"{}", b'["push"]', b'["push",[]]', b"[1,{}]", b'["push",{},1]', b'["push",{}]x', b"[" * 9999],
)
def test_a_text_that_says_nothing_is_a_broken_message(text: bytes) -> None:
    with pytest.raises(BrokenMessage):
        parse_text(text)
