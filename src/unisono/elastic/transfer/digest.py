"""One short text that says whether two workers' states are the same bits."""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch import Tensor
from xxhash import xxh3_128

from unisono.checkpoint.fingerprint import raw_bytes
from unisono.checkpoint.safetensors_format import dtype_name


def digest(tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> str:
    """xxh3 of all names in order, with dtype, shape and bytes, and of the numbers: 128 bits in hexadecimal digits.

    It guards against chance, not against malice. Contiguous tensors in a CPU's memory are read where they lie.
    """
    found = xxh3_128(json.dumps(dict(numbers), sort_keys=True).encode())
    for name in sorted(tensors):
        x = tensors[name]
        # Where a name ends and the next begins is said by JSON.
        found.update(json.dumps([name, dtype_name(x.dtype), list(x.shape)]).encode())
        found.update(raw_bytes(x))
    return found.hexdigest()
