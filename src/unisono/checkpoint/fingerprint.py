"""Hashes of tensors: `fingerprint` of a set of tensors, `checksum` of the bytes of one tensor.

A fingerprint hashes this encoding, name by name in the order of Unicode code points. Every number is 8 bytes, unsigned,
little-endian, so that no two different sets of tensors have the same encoding:

    length of the name in UTF-8, the name
    length of the dtype's name, the name as torch prints it, without "torch." (``bfloat16``)
    number of dimensions, each dimension
    number of bytes, the elements in row-major order, little-endian
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, uint8
from xxhash import xxh3_128_digest

from unisono.checkpoint.safetensors_format import Spec, dtype_name
from unisono.checkpoint.tensor_stream import TensorSource


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of all tensors by sorted name: name, dtype, shape and bytes; 64 hexadecimal digits.

    Independent of strides, device and the mapping's order. Any dense dtype and shape is allowed, scalars and empty
    tensors included.
    """
    in_order = ((name, tensors[name]) for name in sorted(tensors))
    return _digest((name, Spec(x.dtype, tuple(x.shape)), iter([raw_bytes(x)])) for name, x in in_order)


def fingerprint_of(source: TensorSource, prefix: str = "model/") -> str:
    """The `fingerprint` of the tensors in `source` whose names begin with `prefix`, without that prefix.

    It is the fingerprint of the whole tensors, whichever boxes were written. They are read a few megabytes at a time.
    """
    names = sorted(name for name in source.specs if name.startswith(prefix))
    return _digest((name.removeprefix(prefix), source.specs[name], source.stream(name)) for name in names)


CHECKSUM_BYTES = 16


def checksum(tensor: Tensor) -> bytes:
    """The 128-bit XXH3 of the tensor's bytes; guards against accidents, not against forgery."""
    return xxh3_128_digest(raw_bytes(tensor))


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
    """The elements in row-major order as bytes; a view of the memory of a contiguous CPU tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memoryview(plain.reshape(-1).view(uint8).numpy())  # type: ignore[arg-type]


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
