"""The safetensors format as arithmetic: the position of each tensor in a file.

    8 bytes     length of the header, little-endian
    header      JSON: name -> dtype, shape, [begin, end) of its bytes; spaces up to a page boundary
    data        the tensors, little-endian, without gaps; wider dtypes first (so all are aligned), then by name

Positions follow from the tensors' dtypes and shapes alone. A reader that knows those needs no header, and a header that
differs by one byte is damaged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unisono.errors import CheckpointError

PAGE = 4096  # the data begins on a page boundary, as needed to bypass the page cache
HEADER_LIMIT = 100_000_000  # bytes; the safetensors library reads no longer header

CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of `dtype` as torch prints it, without ``torch.``."""
    return str(dtype).removeprefix("torch.")


DTYPES: dict[str, torch.dtype] = {dtype_name(dtype): dtype for dtype in CODES}


@dataclass(frozen=True)
class Spec:
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


@dataclass(frozen=True)
class Slot:
    """The position of a tensor in the file: bytes ``[begin, end)``."""

    name: str
    spec: Spec
    begin: int
    end: int


@dataclass(frozen=True)
class Container:
    """The structure of one safetensors file: its header and the position of each tensor."""

    header: bytes
    slots: tuple[Slot, ...]

    @cached_property
    def nbytes(self) -> int:
        return self.slots[-1].end if self.slots else len(self.header)


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Dtype and shape of each tensor."""
    return {name: Spec(x.dtype, tuple(x.shape)) for name, x in tensors.items()}


def container(specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> Container:
    """The file for tensors of these dtypes and shapes.

    Args:
        metadata: further entries of the header, next to ``format``.

    Raises:
        CheckpointError: the format does not allow a dtype or a name, or a header as long as these tensors need.
    """
    for name, spec in specs.items():
        if spec.dtype not in CODES or name == "__metadata__":
            raise CheckpointError(f"tensor {name!r} of {spec} cannot be stored in a safetensors file")
    order = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offsets = [0]
    for name in order:
        offsets.append(offsets[-1] + specs[name].nbytes)
        shape, code = list(specs[name].shape), CODES[specs[name].dtype]
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": offsets[-2:]}
    header = _padded(json.dumps(entries, separators=(",", ":")).encode())
    slots = tuple(
        Slot(name, specs[name], len(header) + begin, len(header) + end)
        for name, begin, end in zip(order, offsets, offsets[1:])
    )
    return Container(header, slots)


def _padded(text: bytes) -> bytes:
    length = -(-(len(text) + 8) // PAGE) * PAGE - 8
    if length > HEADER_LIMIT:
        raise CheckpointError(f"a header of {length} bytes exceeds the {HEADER_LIMIT} that safetensors allows")
    return length.to_bytes(8, "little") + text.ljust(length)
