"""What a checkpoint says of itself, and how that is written down so that one wrong byte shows.

`manifest.json` describes the whole checkpoint, `part-r.json` (while it is being written) the part of worker
r. Both are *sealed* JSON: one object whose last field ``sha256`` is the SHA-256 of all bytes before that
field.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.checkpoint.container import DTYPES, Spec, dtype_name

FORMAT = 1
SEAL = ',"sha256":"{}"}}\n'


@dataclass(frozen=True)
class Entry:
    """A tensor, and the 128-bit XXH3 of its bytes, by which damage is pinned to it.

    It is a checksum against accidents: whoever may write the checkpoint may write its checksums too. A
    cryptographic hash would cost training ten times as much.
    """

    spec: Spec
    xxh3: str


@dataclass(frozen=True)
class Part:
    """One worker's file: its length in bytes and what it holds.

    Nothing else of it needs a checksum: its header follows from what it holds (see `container`), and the rest
    is tensors without gaps. So every byte is hashed once.
    """

    nbytes: int
    tensors: Mapping[str, Entry]


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint; part *r* is in the file ``part_file(r)``."""

    step: int
    meta: Any
    parts: tuple[Part, ...]


def part_file(rank: int) -> str:
    """The file that holds worker `rank`'s share of the tensors."""
    return f"part-{rank}.safetensors"


def seal(fields: Mapping[str, Any]) -> bytes:
    """Sealed JSON of `fields`, which must not be empty."""
    body = json.dumps(fields, separators=(",", ":"))[:-1].encode()
    return body + SEAL.format(hashlib.sha256(body).hexdigest()).encode()


def unseal(sealed: bytes) -> dict[str, Any]:
    """The fields of sealed JSON.

    Raises:
        ValueError: a byte differs from what was written, or it is not a JSON object.
    """
    cut = max(len(sealed) - len(SEAL.format("0" * 64)), 0)
    body, end = sealed[:cut], sealed[cut:]
    if end != SEAL.format(hashlib.sha256(body).hexdigest()).encode():
        raise ValueError("its checksum does not match its content")
    try:
        fields = json.loads(body + b"}")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")
    return fields


def encode_part(step: int, part: Part) -> bytes:
    """What a worker says of its part, sealed."""
    tensors = {name: _encode_entry(entry) for name, entry in part.tensors.items()}
    return seal({"format": FORMAT, "step": step, "bytes": part.nbytes, "tensors": tensors})


def decode_part(sealed: bytes) -> tuple[int, Part]:
    """The step and the part. Raises ValueError where it is damaged."""
    fields = _versioned(sealed)
    tensors = {name: _decode_entry(name, entry) for name, entry in _object(fields, "tensors").items()}
    return _whole(fields, "step"), Part(_whole(fields, "bytes"), tensors)


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as a file, sealed."""
    parts = {part_file(r): {"bytes": p.nbytes} for r, p in enumerate(manifest.parts)}
    tensors = {
        name: _encode_entry(entry) | {"part": r}
        for r, part in enumerate(manifest.parts)
        for name, entry in part.tensors.items()
    }
    fields = {
        "format": FORMAT,
        "step": manifest.step,
        "meta": manifest.meta,
        "parts": parts,
        "tensors": tensors,
    }
    return seal(fields)


def decode_manifest(sealed: bytes) -> Manifest:
    """The manifest. Raises ValueError, which says what is wrong, for everything that this package did not
    write."""
    fields = _versioned(sealed)
    files = _object(fields, "parts")
    if list(files) != [part_file(r) for r in range(len(files))]:
        raise ValueError(f"parts are named {', '.join(map(repr, files))}")
    held: list[dict[str, Entry]] = [{} for _ in files]
    for name, entry in _object(fields, "tensors").items():
        rank = _whole(entry, "part") if isinstance(entry, dict) else -1
        if not 0 <= rank < len(files):
            raise ValueError(f"tensor {name!r} lies in no part")
        held[rank][name] = _decode_entry(name, entry)
    parts = tuple(Part(_whole(file, "bytes"), tensors) for file, tensors in zip(files.values(), held))
    if "meta" not in fields:
        raise ValueError("meta is missing")
    return Manifest(_whole(fields, "step"), fields["meta"], parts)


def merged(step: int, meta: Any, parts: Sequence[Part]) -> Manifest:
    """The manifest of these parts. Raises ValueError where two parts hold the same tensor."""
    names = [name for part in parts for name in part.tensors]
    if len(names) != len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two workers wrote tensor {twice!r}: they do not agree on who writes what")
    return Manifest(step, meta, tuple(parts))


def _encode_entry(entry: Entry) -> dict[str, Any]:
    return {
        "dtype": dtype_name(entry.spec.dtype),
        "shape": list(entry.spec.shape),
        "xxh3": entry.xxh3,
    }


def _decode_entry(name: str, fields: Any) -> Entry:
    shape, xxh3 = _field(fields, "shape", list), _field(fields, "xxh3", str)
    dtype = DTYPES.get(_field(fields, "dtype", str))
    if dtype is None or not all(_is_whole(n) for n in shape):
        raise ValueError(f"tensor {name!r} has no possible dtype and shape")
    # Torch counts in 63 bits; an empty tensor may still claim absurd lengths elsewhere.
    if math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 2**63:
        raise ValueError(f"tensor {name!r} claims more bytes than a machine can have")
    return Entry(Spec(dtype, tuple(shape)), xxh3)


def _versioned(sealed: bytes) -> dict[str, Any]:
    fields = unseal(sealed)
    if fields.get("format") != FORMAT:
        raise ValueError(f"format {fields.get('format')!r} is not {FORMAT}, which this version reads")
    return fields


def _field(fields: Any, name: str, kind: type) -> Any:
    value = fields.get(name) if isinstance(fields, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"{name} is missing or not of the right kind")
    return value


def _object(fields: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = _field(fields, name, dict)
    return found


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _whole(fields: Any, name: str) -> int:
    value: int = _field(fields, name, int)
    if not _is_whole(value):
        raise ValueError(f"{name} = {value!r} is not a possible number")
    return value
