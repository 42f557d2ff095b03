"""A checkpoint that is read piece by piece: any box of any tensor, whichever boxes were written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_128

from unisono.checkpoint import directory as place
from unisono.checkpoint.fingerprint import raw_bytes
from unisono.checkpoint.manifest import Entry, Manifest, PartFile, decode_manifest, part_file
from unisono.checkpoint.safetensors_format import Spec, container
from unisono.checkpoint.tensor_stream import CHUNK, read_exactly
from unisono.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from unisono.tensors.box import Box, slabs

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes: copying is blind to the dtype


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor in a part's file, from byte `begin` on."""

    name: str
    file: Path
    begin: int
    entry: Entry

    @property
    def box(self) -> Box:
        """Which box of the tensor it is."""
        return self.entry.piece.box

    @property
    def region(self) -> str:
        """The tensor and, where it is cut, the box, for a person."""
        return f"tensor {self.name!r}" + ("" if self.box.is_whole else f" {self.box} of {list(self.box.shape)}")


class OpenedCheckpoint:
    """A checkpoint whose manifest is sound, and whose parts are there in full length.

    Bytes are verified when they are first needed, by the digest of the box in which they lie, and never used before.

    Args:
        path: its directory.
        manifest: what it says of itself.
        stored: by name, the boxes of each tensor.
    """

    def __init__(self, path: Path, manifest: Manifest, stored: Mapping[str, list[StoredBox]]) -> None:
        self.path, self.step, self.meta = path, manifest.step, manifest.meta
        self.parts = manifest.parts
        self.stored = stored
        self.specs: Mapping[str, Spec] = {name: boxes[0].entry.piece.whole for name, boxes in stored.items()}
        self._verified: set[StoredBox] = set()

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of tensor `name`, all of it by default: on the CPU, contiguous, with memory of its own.

        Raises:
            CheckpointMismatch: there is no such tensor, or it has another shape than the box expects.
            CheckpointDamaged: names the file, the tensor and the region that are not what was written.
        """
        spec = self.specs.get(name)
        if spec is None:
            raise CheckpointMismatch(f"tensor {name!r} is not in the checkpoint")
        box = box or Box.whole(spec.shape)
        if box.shape != spec.shape:
            raise CheckpointMismatch(f"tensor {name!r} is {list(box.shape)} here and {spec} in the checkpoint")
        pieces = [(stored, common) for stored in self.stored[name] if (common := stored.box.overlap(box))]
        with damage(pieces[0][0].file if pieces else self.path):
            out = torch.empty(box.size, dtype=spec.dtype)
        bits = _bits(out)
        for stored, common in pieces:
            with damage(stored.file), open(place.open_to_read(stored.file), "rb", buffering=0) as file:
                self._fill(file.fileno(), stored, common, bits[common.slices(box)])
        return out

    def stream(self, name: str) -> Iterator[memoryview]:
        """All of tensor `name` in row-major order, some megabytes at a time. Raises as `read`."""
        spec = self.specs[name]
        for slab in slabs(Box.whole(spec.shape), CHUNK // spec.dtype.itemsize):
            yield raw_bytes(self.read(name, slab))

    def verify(self, stored: StoredBox) -> None:
        """Read one box and compare its digest, once. Raises CheckpointDamaged."""
        if stored not in self._verified:
            with damage(stored.file), open(place.open_to_read(stored.file), "rb", buffering=0) as file:
                self._check(stored, (raw_bytes(piece) for _, piece in _pieces(file.fileno(), stored, stored.box)))

    def _fill(self, descriptor: int, stored: StoredBox, common: Box, target: Tensor) -> None:
        """Put the numbers of `common`, a box in `stored`, into `target`."""
        if common == stored.box and target.is_contiguous():
            self._check(stored, _straight(descriptor, stored, target))
        elif stored in self._verified:
            for slab, piece in _pieces(descriptor, stored, common.span(stored.box), common):
                _put(slab, piece, common, target)
        else:
            self._check(stored, _putting(_pieces(descriptor, stored, stored.box), common, target))

    def _check(self, stored: StoredBox, read: Iterator[memoryview]) -> None:
        """Take over what is read, all of the stored box, if it is what was written. Raises ValueError."""
        digest = xxh3_128()
        for piece in read:
            digest.update(piece)
        if digest.hexdigest() != stored.entry.xxh3:
            raise ValueError(f"the bytes of {stored.region} are not what was written")
        self._verified.add(stored)


def open_checkpoint(path: str | os.PathLike[str]) -> OpenedCheckpoint:
    """The checkpoint in directory `path`.

    Raises:
        CheckpointDamaged: the manifest, or the length or header of a part, is not what was written.
    """
    path = Path(path)
    manifest = read_manifest(path)
    stored: dict[str, list[StoredBox]] = {name: [] for name in manifest.tensors}
    for rank, part in enumerate(manifest.parts):
        for piece in read_part(path / part_file(rank), part):
            stored[piece.name].append(piece)
    return OpenedCheckpoint(path, manifest, stored)


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in `path`. Raises CheckpointDamaged."""
    file = path / place.MANIFEST
    with damage(file):
        manifest = decode_manifest(place.read_small(file, place.JSON_LIMIT))
    if place.step_of(path.name.strip(".").removesuffix(".replaced")) not in (None, manifest.step):
        raise CheckpointDamaged(f"{file}: it is the manifest of step {manifest.step}")
    return manifest


def read_part(file: Path, part: PartFile) -> list[StoredBox]:
    """Where each box lies in a part's file, whose length and header are right. Raises CheckpointDamaged."""
    with damage(file):
        expected = container({name: entry.piece.spec for name, entry in part.tensors.items()})
        with open(place.open_to_read(file), "rb", buffering=0) as stream:
            length = os.fstat(stream.fileno()).st_size
            # All lengths must agree before memory is taken.
            if length != part.nbytes or length != expected.nbytes:
                raise ValueError(f"{length} bytes long, where {part.nbytes} were written for {expected.nbytes} to hold")
            if stream.read(len(expected.header)) != expected.header:
                raise ValueError("its header is not what was written")
    return [StoredBox(slot.name, file, slot.begin, part.tensors[slot.name]) for slot in expected.slots]


@contextlib.contextmanager
def damage(file: Path) -> Iterator[None]:
    """Whatever goes wrong inside is damage of `file`."""
    try:
        yield
    except CheckpointDamaged:
        raise
    except (OSError, ValueError, CheckpointError, MemoryError, RuntimeError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointDamaged(f"{file}: {what or type(error).__name__}") from error


def _straight(descriptor: int, stored: StoredBox, target: Tensor) -> Iterator[memoryview]:
    """Read the whole box to where it belongs; gives what was just read, some megabytes at a time."""
    memory = raw_bytes(target)
    for begin in range(0, len(memory), CHUNK):
        piece = memory[begin : begin + CHUNK]
        read_exactly(descriptor, piece, stored.begin + begin)
        yield piece


def _pieces(descriptor: int, stored: StoredBox, region: Box, needed: Box | None = None) -> Iterator[tuple[Box, Tensor]]:
    """Read `region`, one run of the stored box, some megabytes at a time, each into the same memory; only those that
    have to do with `needed`."""
    size = stored.entry.piece.dtype.itemsize
    buffer = torch.empty(min(CHUNK // size, region.numel), dtype=_BITS[size])
    for slab in slabs(region, max(1, len(buffer))):
        if needed is None or slab.overlap(needed):
            piece = buffer[: slab.numel].view(slab.size)
            read_exactly(descriptor, raw_bytes(piece), stored.begin + slab.position(stored.box) * size)
            yield slab, piece


def _putting(pieces: Iterator[tuple[Box, Tensor]], common: Box, target: Tensor) -> Iterator[memoryview]:
    for slab, piece in pieces:
        _put(slab, piece, common, target)
        yield raw_bytes(piece)


def _put(slab: Box, piece: Tensor, common: Box, target: Tensor) -> None:
    """Copy what `piece`, which holds `slab`, has of `common`, which `target` holds."""
    if both := slab.overlap(common):
        target[both.slices(common)].copy_(piece[both.slices(slab)])


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers; a scalar stays one."""
    return tensor.view(_BITS[tensor.itemsize])
