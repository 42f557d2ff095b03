"""Everything of a checkpoint read once, and all damage told, not the first alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from unisono.checkpoint.manifest import part_file
from unisono.checkpoint.opened_checkpoint import OpenedCheckpoint, open_checkpoint, read_manifest, read_part
from unisono.errors import CheckpointDamaged


def damages(path: Path) -> Iterator[str]:
    """One sentence for each file of the checkpoint in `path` that is damaged, with the tensors that it held.

    Digests of all bytes are compared, a few megabytes at a time.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointDamaged as error:
        yield str(error)
        return
    for rank, part in enumerate(manifest.parts):
        try:
            stored = read_part(path / part_file(rank), part)
        except CheckpointDamaged as error:
            held = ", ".join(map(repr, part.tensors)) or "no tensor"
            yield f"{error} (it held {held})"
            continue
        opened = OpenedCheckpoint(path, manifest, {piece.name: [piece] for piece in stored})
        for piece in stored:
            try:
                opened.verify(piece)
            except CheckpointDamaged as error:
                yield str(error)


def verified(path: Path) -> OpenedCheckpoint:
    """The checkpoint in `path`, all of whose bytes have been read and compared. Raises CheckpointDamaged."""
    opened = open_checkpoint(path)
    for pieces in opened.stored.values():
        for stored in pieces:
            opened.verify(stored)
    return opened
