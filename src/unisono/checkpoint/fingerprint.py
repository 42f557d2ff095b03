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
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, uint8
from xxhash import xxh3_64

from unisono.checkpoint.safetensors_format import Spec, dtype_name
from unisono.checkpoint.tensor_stream import TensorSource


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of all tensors by sorted name: name, dtype, shape and bytes; 64 hexadecimal digits.

    Strides, device and the mapping's order do not enter; any dense dtype and shape does, scalars and empty
    included.
    """
    found = ((name, tensors[name]) for name in sorted(tensors))
    return _digest((name, Spec(x.dtype, tuple(x.shape)), iter([raw_bytes(x)])) for name, x in found)


def fingerprint_of(source: TensorSource, prefix: str = "model/") -> str:
    """The `fingerprint` of those tensors of an opened checkpoint whose names begin with `prefix`, which is taken off.

    Whatever boxes were written, it is that of the whole tensors, read a few megabytes at a time.
    """
    names = sorted(name for name in source.specs if name.startswith(prefix))
    return _digest((name.removeprefix(prefix), source.specs[name], source.stream(name)) for name in names)


def digest(tensors: Mapping[str, Tensor]) -> int:
    """A quick number of 64 bits (XXH3) that says whether two sets of tensors of the same names, dtypes and shapes are
    the same bits."""
    found = xxh3_64()
    for name in sorted(tensors):
        found.update(raw_bytes(tensors[name]))
    return found.intdigest()


def _digest(tensors: Iterable[tuple[str, Spec, Iterator[memoryview]]]) -> str:
    digest = hashlib.sha256()
    for name, spec, pieces in tensors:
        for text in (name, dtype_name(spec.dtype)):
            digest.update(_number(len(text.encode())) + text.encode())
        digest.update(_number(len(spec.shape)) + b"".join(map(_number, spec.shape)) + _number(spec.nbytes))
        for piece in pieces:
            digest.update(piece)
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements in row-major order as flat bytes; shares the memory of a contiguous CPU
    tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memoryview(plain.reshape(-1).view(uint8).numpy())  # type: ignore[arg-type]


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
