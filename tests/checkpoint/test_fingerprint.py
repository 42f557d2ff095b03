"""Fingerprints of sets of tensors."""

from __future__ import annotations

import hashlib

import pytest
import torch

from tests.checkpoint.states import every_kind
from unisono.checkpoint import fingerprint


def test_the_encoding_is_the_documented_one() -> None:
    def number(n: int) -> bytes:
        return n.to_bytes(8, "little")

    expected = number(1) + b"a" + number(7) + b"float32" + number(2) + number(1) + number(2) + number(8)
    expected += bytes.fromhex("0000803f00000040")
    expected += number(1) + b"b" + number(5) + b"int64" + number(0) + number(8) + number(5)
    tensors = {"b": torch.tensor(5), "a": torch.tensor([[1.0, 2.0]])}
    assert fingerprint(tensors) == hashlib.sha256(expected).hexdigest()


def test_neither_order_nor_strides_matter() -> None:
    tensors = every_kind()
    turned = {name: tensors[name].detach().clone(memory_format=torch.contiguous_format) for name in reversed(tensors)}
    assert fingerprint(turned) == fingerprint(tensors)


@pytest.mark.parametrize("name", [name for name, tensor in every_kind().items() if tensor.numel()])
def test_every_tensor_counts(name: str) -> None:
    tensors = every_kind()
    flat = tensors[name].detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).clone()
    flat[-1] ^= 1
    changed = flat.view(tensors[name].dtype).view(tensors[name].shape)
    assert fingerprint(tensors | {name: changed}) != fingerprint(tensors)


def test_name_dtype_and_shape_count() -> None:
    x = torch.zeros(4)
    prints = [
        {"a": x},
        {"b": x},
        {"a": x.view(2, 2)},
        {"a": x.view(torch.int32)},
        {"a": x[:2], "b": x[:2]},
        {},
    ]
    assert len({fingerprint(tensors) for tensors in prints}) == len(prints)
