"""Reads any box of any tensor from a checkpoint, whichever boxes were written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_128

from unisono.checkpoint import directory as layout
from unisono.checkpoint.fingerprint import raw_bytes
from unisono.checkpoint.manifest import Entry, Manifest, PartFile, decode_manifest, part_file
from unisono.checkpoint.safetensors_format import Spec, container
from unisono.checkpoint.tensor_stream import CHUNK, read_exactly
from unisono.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from unisono.tensors.box import Box, slabs

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by item size: elements are copied as bits


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor in a part file, from byte `begin` on."""

    name: str
    file: Path
    begin: int
    entry: Entry

    @property
    def box(self) -> Box:
        """The box."""
        return self.entry.shard.box

    @property
    def region(self) -> str:
        """The tensor and, if it is not whole, the box, as text."""
        return f"tensor {self.name!r}" + ("" if self.box.is_whole else f" {self.box} of {list(self.box.shape)}")


class OpenedCheckpoint:
    """A checkpoint whose manifest is sound, and whose part files have their full length.

    Bytes are verified when they are first read, by the digest of their box, and are not used unless it matches.

    Args:
        path: the checkpoint's directory.
        manifest: the checkpoint's manifest.
        stored: the boxes of each tensor, by name.
    """

    def __init__(self, path: Path, manifest: Manifest, stored: Mapping[str, list[StoredBox]]) -> None:
        self.path, self.step, self.meta = path, manifest.step, manifest.meta
        self.parts = manifest.parts
        self.stored = stored
        self.specs: Mapping[str, Spec] = {name: boxes[0].entry.shard.whole for name, boxes in stored.items()}
        self._verified: set[StoredBox] = set()

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of tensor `name`, by default the whole tensor, as a new contiguous tensor on the CPU.

        Raises:
            CheckpointMismatch: there is no such tensor, or `box` is a box of a tensor of another shape.
            CheckpointDamaged: names the file, the tensor and the region that are damaged.
        """
        spec = self.specs.get(name)
        if spec is None:
            raise CheckpointMismatch(f"tensor {name!r} is not in the checkpoint")
        box = box or Box.whole(spec.shape)
        if box.shape != spec.shape:
            raise CheckpointMismatch(f"tensor {name!r} is {list(box.shape)} here and {spec} in the checkpoint")
        sources = [(stored, common) for stored in self.stored[name] if (common := stored.box.overlap(box))]
        with damage(sources[0][0].file if sources else self.path):
            out = torch.empty(box.size, dtype=spec.dtype)
        bits = _bits(out)
        for stored, common in sources:
            with damage(stored.file), open(layout.open_to_read(stored.file), "rb", buffering=0) as file:
                self._fill(file.fileno(), stored, common, bits[common.slices(box)])
        return out

    def stream(self, name: str) -> Iterator[memoryview]:
        """The bytes of tensor `name` in row-major order, a few megabytes at a time. Raises as `read`."""
        spec = self.specs[name]
        for slab in slabs(Box.whole(spec.shape), CHUNK // spec.dtype.itemsize):
            yield raw_bytes(self.read(name, slab))

    def verify(self, stored: StoredBox) -> None:
        """Read one box and compare its digest, unless this was done before. Raises CheckpointDamaged."""
        if stored not in self._verified:
            with damage(stored.file), open(layout.open_to_read(stored.file), "rb", buffering=0) as file:
                self._check(stored, (raw_bytes(piece) for _, piece in _pieces(file.fileno(), stored, stored.box)))

    def _fill(self, descriptor: int, stored: StoredBox, common: Box, target: Tensor) -> None:
        """Read `common`, a box inside `stored`, into `target`."""
        if common == stored.box and target.is_contiguous():
            self._check(stored, _straight(descriptor, stored, target))
        elif stored in self._verified:
            for slab, piece in _pieces(descriptor, stored, common.span(stored.box), common):
                _put(slab, piece, common, target)
        else:
            self._check(stored, _putting(_pieces(descriptor, stored, stored.box), common, target))

    def _check(self, stored: StoredBox, read: Iterator[memoryview]) -> None:
        """Consume `read`, the bytes of the whole stored box, and compare their digest. Raises ValueError."""
        digest = xxh3_128()
        for piece in read:
            digest.update(piece)
        if digest.hexdigest() != stored.entry.xxh3:
            raise ValueError(f"the bytes of {stored.region} are not what was written")
        self._verified.add(stored)


def open_checkpoint(path: str | os.PathLike[str]) -> OpenedCheckpoint:
    """Open the checkpoint in directory `path`.

    Raises:
        CheckpointDamaged: the manifest, or the length or header of a part file, is wrong.
    """
    path = Path(path)
    manifest = read_manifest(path)
    stored: dict[str, list[StoredBox]] = {name: [] for name in manifest.tensors}
    for rank, part in enumerate(manifest.parts):
        for box in read_part(path / part_file(rank), part):
            stored[box.name].append(box)
    return OpenedCheckpoint(path, manifest, stored)


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in `path`. Raises CheckpointDamaged."""
    file = path / layout.MANIFEST
    with damage(file):
        manifest = decode_manifest(layout.read_small(file, layout.JSON_LIMIT))
    if layout.step_of(path.name.strip(".").removesuffix(".replaced")) not in (None, manifest.step):
        raise CheckpointDamaged(f"{file}: it is the manifest of step {manifest.step}, in the directory of another step")
    return manifest


def read_part(file: Path, part: PartFile) -> list[StoredBox]:
    """The boxes in a part file, after a check of its length and header. Raises CheckpointDamaged."""
    with damage(file):
        expected = container({name: entry.shard.spec for name, entry in part.tensors.items()})
        with open(layout.open_to_read(file), "rb", buffering=0) as stream:
            length = os.fstat(stream.fileno()).st_size
            # All lengths must agree before memory is allocated.
            if length != part.nbytes or length != expected.nbytes:
                expectation = f"the manifest says {part.nbytes}, and its boxes take {expected.nbytes}"
                raise ValueError(f"it has {length} bytes, but {expectation}")
            if stream.read(len(expected.header)) != expected.header:
                raise ValueError("its header is not what was written")
    return [StoredBox(slot.name, file, slot.begin, part.tensors[slot.name]) for slot in expected.slots]


@contextlib.contextmanager
def damage(file: Path) -> Iterator[None]:
    """A context that turns errors into `CheckpointDamaged`, with the name of `file`."""
    try:
        yield
    except CheckpointDamaged:
        raise
    except (OSError, ValueError, CheckpointError, MemoryError, RuntimeError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointDamaged(f"{file}: {what or type(error).__name__}") from error


def _straight(descriptor: int, stored: StoredBox, target: Tensor) -> Iterator[memoryview]:
    """Read the whole box into `target`; yields the bytes just read, a few megabytes at a time."""
    memory = raw_bytes(target)
    for begin in range(0, len(memory), CHUNK):
        piece = memory[begin : begin + CHUNK]
        read_exactly(descriptor, piece, stored.begin + begin)
        yield piece


def _pieces(descriptor: int, stored: StoredBox, region: Box, needed: Box | None = None) -> Iterator[tuple[Box, Tensor]]:
    """Read `region`, one contiguous run of the stored box, a few megabytes at a time into the same buffer.

    Pieces that do not overlap `needed` are skipped.
    """
    size = stored.entry.shard.dtype.itemsize
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
    """Copy the overlap of `slab` and `common` from `piece`, the elements of `slab`, to `target`, those of `common`."""
    if both := slab.overlap(common):
        target[both.slices(common)].copy_(piece[both.slices(slab)])


def _bits(tensor: Tensor) -> Tensor:
    """A view of `tensor` as integers of the same size."""
    return tensor.view(_BITS[tensor.itemsize])
