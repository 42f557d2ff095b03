"""Computes the digest of a state, by which ranks compare their states bit by bit."""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch import Tensor
from xxhash import xxh3_128

from unisono.checkpoint.fingerprint import raw_bytes
from unisono.checkpoint.safetensors_format import dtype_name


def state_digest(tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> str:
    """The 128-bit XXH3 of names in order, dtypes, shapes, bytes and `numbers`, as hexadecimal digits.

    It guards against accidents, not against forgery. Contiguous tensors in CPU memory are not copied.
    """
    hashed = xxh3_128(json.dumps(dict(numbers), sort_keys=True).encode())
    for name in sorted(tensors):
        x = tensors[name]
        # JSON separates the fields, so that different states have different encodings.
        hashed.update(json.dumps([name, dtype_name(x.dtype), list(x.shape)]).encode())
        hashed.update(raw_bytes(x))
    return hashed.hexdigest()
