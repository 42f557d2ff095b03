"""The manifest of a checkpoint, in a format that detects any wrong byte.

`manifest.json` describes the whole checkpoint, `part-r.json` (while the checkpoint is in progress) the part file of
worker r. Both are *sealed* JSON: one object whose last field ``sha256`` is the SHA-256 of all bytes before that field.

A tensor that is whole in one part file is written ``{"dtype", "shape", "part", "xxh3"}``. A tensor in several boxes is
written ``{"dtype", "shape", "boxes": [{"part", "offset", "size", "xxh3"}, ...]}``. Format 1 has only whole tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.checkpoint.ownership import TensorShard
from unisono.checkpoint.safetensors_format import DTYPES, dtype_name
from unisono.tensors.box import Box, check_tiling

FORMAT = 2
READABLE = (1, 2)
SEAL = ',"sha256":"{}"}}\n'


@dataclass(frozen=True)
class Entry:
    """A box of a tensor and the 128-bit XXH3 of its bytes, by which damage is located.

    This hash guards against accidents only: a process that can forge the checkpoint can forge hashes too. A
    cryptographic hash would cost ten times as much time.
    """

    shard: TensorShard
    xxh3: str


@dataclass(frozen=True)
class PartFile:
    """One worker's file: its length in bytes and its boxes.

    Nothing but the boxes needs a checksum: the header follows from them (see `container`), and the rest of the file is
    tensors without gaps. So every byte is hashed once.
    """

    nbytes: int
    tensors: Mapping[str, Entry]


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint; part *r* is in the file ``part_file(r)``."""

    step: int
    meta: Any
    parts: tuple[PartFile, ...]

    @property
    def tensors(self) -> dict[str, list[tuple[int, Entry]]]:
        """For each tensor, by name, its boxes, each with the number of the part file that has it."""
        found: dict[str, list[tuple[int, Entry]]] = {}
        for rank, part in enumerate(self.parts):
            for name, entry in part.tensors.items():
                found.setdefault(name, []).append((rank, entry))
        return found


def part_file(rank: int) -> str:
    """The name of the part file of worker `rank`."""
    return f"part-{rank}.safetensors"


def seal(fields: Mapping[str, Any]) -> bytes:
    """`fields`, which must not be empty, as sealed JSON."""
    body = json.dumps(fields, separators=(",", ":"))[:-1].encode()
    return body + SEAL.format(hashlib.sha256(body).hexdigest()).encode()


def unseal(sealed: bytes) -> dict[str, Any]:
    """The fields of sealed JSON.

    Raises:
        ValueError: the seal does not match the content, or the content is not a JSON object.
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


def encode_part(step: int, part: PartFile) -> bytes:
    """The description of a part file, sealed."""
    tensors = {name: _encode_spec(entry) | _encode_box(entry) for name, entry in part.tensors.items()}
    return seal({"format": FORMAT, "step": step, "bytes": part.nbytes, "tensors": tensors})


def decode_part(sealed: bytes) -> tuple[int, PartFile]:
    """Inverse of `encode_part`: the step and the part file. Raises ValueError if it is damaged."""
    fields = _versioned(sealed)
    tensors = {name: _decode_entry(name, entry, entry) for name, entry in _object(fields, "tensors").items()}
    return _whole(fields, "step"), PartFile(_whole(fields, "bytes"), tensors)


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as a file, sealed."""
    fields = {
        "format": FORMAT,
        "step": manifest.step,
        "meta": manifest.meta,
        "parts": {part_file(r): {"bytes": p.nbytes} for r, p in enumerate(manifest.parts)},
        "tensors": {name: _encode_tensor(boxes) for name, boxes in manifest.tensors.items()},
    }
    return seal(fields)


def decode_manifest(sealed: bytes) -> Manifest:
    """Inverse of `encode_manifest`.

    Raises:
        ValueError: this is not a manifest that this package wrote. If boxes overlap or leave a gap, the message names
            the tensor and the region.
    """
    fields = _versioned(sealed)
    files = _object(fields, "parts")
    if list(files) != [part_file(r) for r in range(len(files))]:
        raise ValueError(f"parts are named {', '.join(map(repr, files))}")
    held: list[dict[str, Entry]] = [{} for _ in files]
    for name, tensor in _object(fields, "tensors").items():
        for box in _boxes(name, tensor):
            rank = _whole(box, "part") if isinstance(box, dict) else -1
            if not 0 <= rank < len(files) or name in held[rank]:
                raise ValueError(f"tensor {name!r} is in a part file that does not exist, or twice in one")
            held[rank][name] = _decode_entry(name, tensor, box)
    if "meta" not in fields:
        raise ValueError("meta is missing")
    parts = tuple(PartFile(_whole(file, "bytes"), tensors) for file, tensors in zip(files.values(), held))
    return _checked(Manifest(_whole(fields, "step"), fields["meta"], parts))


def merged(step: int, meta: Any, parts: Sequence[PartFile]) -> Manifest:
    """The manifest of these part files. Raises ValueError unless they cover each tensor exactly once."""
    try:
        return _checked(Manifest(step, meta, tuple(parts)))
    except ValueError as error:
        raise ValueError(f"{error}: the workers do not agree on which worker writes what") from None


def _checked(manifest: Manifest) -> Manifest:
    for name, found in manifest.tensors.items():
        shards = [entry.shard for _, entry in found]
        for shard in shards:
            if shard.whole != shards[0].whole:
                raise ValueError(f"tensor {name!r} is {shards[0].whole} in one part and {shard.whole} in another")
        try:
            check_tiling(shards[0].box.shape, [shard.box for shard in shards])
        except ValueError as error:
            raise ValueError(f"tensor {name!r}: {error}") from None
    return manifest


def _encode_tensor(boxes: Sequence[tuple[int, Entry]]) -> dict[str, Any]:
    spec = _encode_spec(boxes[0][1])
    found = [{"part": rank} | _encode_box(entry) for rank, entry in boxes]
    return spec | found[0] if boxes[0][1].shard.box.is_whole else spec | {"boxes": found}


def _encode_spec(entry: Entry) -> dict[str, Any]:
    return {"dtype": dtype_name(entry.shard.dtype), "shape": entry.shard.box.shape}


def _encode_box(entry: Entry) -> dict[str, Any]:
    box = entry.shard.box
    where = {} if box.is_whole else {"offset": box.offset, "size": box.size}
    return where | {"xxh3": entry.xxh3}


def _boxes(name: str, tensor: Any) -> list[Any]:
    if not isinstance(tensor, dict) or "boxes" not in tensor:
        return [tensor]
    if "part" in tensor or not tensor["boxes"]:
        raise ValueError(f"tensor {name!r} has both boxes and a part file of its own, or an empty list of boxes")
    boxes: list[Any] = _field(tensor, "boxes", list)
    return boxes


def _decode_entry(name: str, spec: Any, fields: Any) -> Entry:
    shape, dtype = _field(spec, "shape", list), DTYPES.get(_field(spec, "dtype", str))
    if dtype is None or not all(_is_whole(n) for n in shape):
        raise ValueError(f"tensor {name!r} has no possible dtype and shape")
    # Torch counts in 63 bits; an empty tensor may still have absurd lengths in other dimensions.
    if math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 2**63:
        raise ValueError(f"tensor {name!r} has more bytes than a machine can have")
    return Entry(TensorShard(dtype, _decode_box(name, tuple(shape), fields)), _field(fields, "xxh3", str))


def _decode_box(name: str, shape: tuple[int, ...], fields: Any) -> Box:
    if "offset" not in fields and "size" not in fields:
        return Box.whole(shape)
    offset, size = _field(fields, "offset", list), _field(fields, "size", list)
    if not all(_is_whole(n) for n in (*offset, *size)):
        raise ValueError(f"tensor {name!r} has no possible box")
    try:
        return Box(shape, tuple(offset), tuple(size))
    except ValueError as error:
        raise ValueError(f"tensor {name!r}: {error}") from None


def _versioned(sealed: bytes) -> dict[str, Any]:
    fields = unseal(sealed)
    if fields.get("format") not in READABLE:
        raise ValueError(f"format {fields.get('format')!r} is none of {READABLE}, which this version reads")
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
