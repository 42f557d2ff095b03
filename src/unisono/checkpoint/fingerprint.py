"""One number that says whether two sets of tensors are the same bits.

The encoding that is hashed, name by name in the order of Unicode code points; every number is 8 bytes,
unsigned, little-endian, so that no two different sets of tensors have the same encoding:

    length of the name in UTF-8, the name
    length of the dtype's name, the name as torch prints it, without "torch." (``bfloat16``)
    number of dimensions, each dimension
    number of bytes, the elements in row-major order, little-endian
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor, uint8


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of all tensors by sorted name: name, dtype, shape and bytes; 64 hexadecimal digits.

    Strides, device and the mapping's order do not enter; any dense dtype and shape does, scalars and empty
    included.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        data = raw_bytes(tensors[name])
        for text in (name, str(tensors[name].dtype).removeprefix("torch.")):
            digest.update(_number(len(text.encode())) + text.encode())
        shape = tensors[name].shape
        digest.update(_number(len(shape)) + b"".join(map(_number, shape)) + _number(data.nbytes))
        digest.update(data)
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements in row-major order as flat bytes; shares the memory of a contiguous CPU
    tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memoryview(plain.reshape(-1).view(uint8).numpy())  # type: ignore[arg-type]


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
