"""Checkpoints read back. Nothing is handed out before every byte of it was verified."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128

from unisono.checkpoint import directory as place
from unisono.checkpoint.container import Slot, container
from unisono.checkpoint.fingerprint import raw_bytes
from unisono.checkpoint.manifest import Entry, Manifest, Part, decode_manifest, part_file
from unisono.errors import CheckpointDamaged, CheckpointError

CHUNK = 32 << 20  # bytes


@dataclass(frozen=True)
class Loaded:
    """A sound checkpoint: its step, tensors by name (on the CPU, each with memory of its own), meta and
    directory."""

    step: int
    tensors: Mapping[str, Tensor]
    meta: Any
    path: Path


def load_newest(directory: str | os.PathLike[str], on_damaged: Callable[[CheckpointDamaged], None]) -> Loaded | None:
    """The newest sound checkpoint; None where there is none at all. What is damaged is told and passed over.

    Raises:
        CheckpointDamaged: there are checkpoints, but not one is sound.
    """
    found = dict(place.checkpoints(directory))
    latest: int | None = None
    try:
        latest = place.read_latest(Path(directory))
    except CheckpointDamaged as damage:
        on_damaged(damage)
    for step in place.newest_first(list(found), latest):
        try:
            return load(found[step])
        except CheckpointDamaged as damage:
            on_damaged(damage)
    if found:
        raise CheckpointDamaged(f"{directory}: not one of its {len(found)} checkpoints is sound")
    return None


def load(path: str | os.PathLike[str]) -> Loaded:
    """The checkpoint in directory `path`.

    Raises:
        CheckpointDamaged: names the file, and where possible the tensor, that is not what was written.
    """
    path = Path(path)
    manifest = _manifest(path)
    tensors: dict[str, Tensor] = {}
    for rank, part in enumerate(manifest.parts):
        file = path / part_file(rank)
        try:
            tensors |= _read_part(file, part)
        except (OSError, ValueError, CheckpointError, MemoryError, RuntimeError) as error:
            raise _damaged(file, error) from error
    return Loaded(manifest.step, tensors, manifest.meta, path)


def _manifest(path: Path) -> Manifest:
    file = path / place.MANIFEST
    try:
        manifest = decode_manifest(place.read_small(file, place.JSON_LIMIT))
    except (OSError, ValueError) as error:
        raise _damaged(file, error) from error
    if place.step_of(path.name.strip(".").removesuffix(".replaced")) not in (None, manifest.step):
        raise CheckpointDamaged(f"{file}: it is the manifest of step {manifest.step}")
    return manifest


def _damaged(file: Path, error: BaseException) -> CheckpointDamaged:
    what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return CheckpointDamaged(f"{file}: {what or type(error).__name__}")


def _read_part(file: Path, part: Part) -> dict[str, Tensor]:
    expected = container({name: entry.spec for name, entry in part.tensors.items()})
    with open(place.open_to_read(file), "rb", buffering=0) as stream:
        length = os.fstat(stream.fileno()).st_size
        # All lengths must agree before memory is taken.
        if length != part.nbytes or length != expected.nbytes:
            raise ValueError(f"{length} bytes long, where {part.nbytes} were written for {expected.nbytes} to hold")
        if stream.read(len(expected.header)) != expected.header:
            raise ValueError("its header is not what was written")
        return {slot.name: _read_tensor(stream.fileno(), slot, part.tensors[slot.name]) for slot in expected.slots}


def _read_tensor(descriptor: int, slot: Slot, entry: Entry) -> Tensor:
    tensor, digest = torch.empty(slot.spec.shape, dtype=slot.spec.dtype), xxh3_128()
    memory = raw_bytes(tensor)
    for begin in range(0, len(memory), CHUNK):
        rest = memory[begin : begin + CHUNK]
        while rest:
            count = os.readv(descriptor, [rest])
            if not count:
                raise ValueError("it became shorter while it was read")
            digest.update(rest[:count])
            rest = rest[count:]
    if digest.hexdigest() != entry.xxh3:
        raise ValueError(f"the bytes of tensor {slot.name!r} are not what was written")
    return tensor
