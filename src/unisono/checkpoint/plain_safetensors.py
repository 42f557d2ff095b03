"""Reads safetensors files of other programs: one file, or several with an index, as transformers writes them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint import directory as layout
from unisono.checkpoint.opened_checkpoint import damage
from unisono.checkpoint.safetensors_format import CODES, HEADER_LIMIT, Slot, Spec
from unisono.checkpoint.tensor_stream import CHUNK, read_exactly
from unisono.errors import CheckpointDamaged

INDEX = ".index.json"
USUAL = "model.safetensors"
_DTYPES = {code: dtype for dtype, code in CODES.items()}


class PlainSafetensors:
    """Tensors of one or more safetensors files, read one at a time.

    Args:
        slots: for each tensor, by name, its file and its position in the file.
        metadata: the metadata in the header of the first file.
    """

    def __init__(self, slots: Mapping[str, tuple[Path, Slot]], metadata: Mapping[str, str]) -> None:
        self._slots, self.metadata = slots, metadata
        self.specs: Mapping[str, Spec] = {name: slot.spec for name, (_, slot) in slots.items()}

    def stream(self, name: str) -> Iterator[memoryview]:
        """The elements of tensor `name` in row-major order, a few megabytes at a time.

        Raises:
            CheckpointDamaged: the file cannot be read, or has become shorter.
        """
        file, slot = self._slots[name]
        with damage(file), open(layout.open_to_read(file), "rb", buffering=0) as stream:
            buffer = memoryview(bytearray(min(CHUNK, slot.end - slot.begin)))
            for begin in range(slot.begin, slot.end, CHUNK):
                piece = buffer[: slot.end - begin]
                read_exactly(stream.fileno(), piece, begin)
                yield piece


def open_plain(path: str | os.PathLike[str]) -> PlainSafetensors:
    """Open a safetensors file, an index, or a directory with ``model.safetensors`` or its index.

    Raises:
        CheckpointDamaged: a file is missing or is not safetensors, or the index does not match the files.
    """
    path = Path(path)
    if path.is_dir():
        path = path / USUAL if (path / USUAL).exists() else path / (USUAL + INDEX)
    if not path.name.endswith(".json"):
        found, metadata = _read(path)
        return PlainSafetensors({name: (path, slot) for name, slot in found.items()}, metadata)
    with damage(path):
        where = _places(json.loads(layout.read_small(path, layout.JSON_LIMIT)))
    files = {file: _read(path.parent / file) for file in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in files[file][0]:
            raise CheckpointDamaged(f"{path.parent / file}: it has no tensor {name!r}, which is in the index")
    slots = {name: (path.parent / file, files[file][0][name]) for name, file in where.items()}
    return PlainSafetensors(slots, next((metadata for _, metadata in files.values()), {}))


def _places(index: Any) -> dict[str, str]:
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ValueError("it has no weight_map from tensors to files")
    for file in found.values():
        if Path(file).name != file:
            raise ValueError(f"it names a file in another directory, {file!r}")
    return found


def _read(file: Path) -> tuple[dict[str, Slot], dict[str, str]]:
    """The tensors and metadata in a file's header, checked against the file's length."""
    with damage(file), open(layout.open_to_read(file), "rb", buffering=0) as stream:
        nbytes = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(HEADER_LIMIT, nbytes - 8):
            raise ValueError("it is no safetensors file")
        text = bytearray(length)
        read_exactly(stream.fileno(), memoryview(text), 8)
        header = _parsed(text)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise ValueError("its metadata is no JSON object")
        slots = {name: _slot(name, entry, 8 + length) for name, entry in header.items()}
        _check_runs(slots, 8 + length, nbytes)
        return slots, {key: value for key, value in metadata.items() if isinstance(value, str)}


def _parsed(text: bytearray) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header


def _slot(name: str, entry: Any, start: int) -> Slot:
    fields = entry if isinstance(entry, dict) else {}
    shape, offsets = fields.get("shape"), fields.get("data_offsets")
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or len(offsets) != 2:  # type: ignore[arg-type]
        raise ValueError(f"its header has no possible shape and position of tensor {name!r}")
    spec = Spec(_dtype(name, fields.get("dtype")), tuple(shape))  # type: ignore[arg-type]
    begin, end = offsets  # type: ignore[misc]
    if end - begin != spec.nbytes:
        raise ValueError(f"tensor {name!r} has {end - begin} bytes, but {spec} takes {spec.nbytes}")
    return Slot(name, spec, start + begin, start + end)


def _dtype(name: str, code: object) -> torch.dtype:
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise ValueError(f"tensor {name!r} has an unknown dtype, {code!r}")
    return dtype


def _check_runs(slots: Mapping[str, Slot], start: int, nbytes: int) -> None:
    """Raise ValueError unless tensors follow each other without gaps up to the end of the file."""
    end = start
    for slot in sorted(slots.values(), key=lambda slot: (slot.begin, slot.end)):
        if slot.begin != end:
            raise ValueError(f"tensor {slot.name!r} does not begin where the one before it ends")
        end = slot.end
    if end != nbytes:
        raise ValueError(f"it has {nbytes} bytes, but its tensors end at byte {end}")
