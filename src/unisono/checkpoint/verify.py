"""Reads all of a checkpoint, and reports all damage in it, not only the first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from unisono.checkpoint.manifest import part_file
from unisono.checkpoint.opened_checkpoint import OpenedCheckpoint, open_checkpoint, read_manifest, read_part
from unisono.errors import CheckpointDamaged


def damages(path: Path) -> Iterator[str]:
    """One sentence for each damaged file or box of the checkpoint in `path`, with the tensors in it.

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
            names = ", ".join(map(repr, part.tensors)) or "no tensor"
            yield f"{error} (it held {names})"
            continue
        opened = OpenedCheckpoint(path, manifest, {box.name: [box] for box in stored})
        for box in stored:
            try:
                opened.verify(box)
            except CheckpointDamaged as error:
                yield str(error)


def verified(path: Path) -> OpenedCheckpoint:
    """Open the checkpoint in `path` and verify all of its bytes. Raises CheckpointDamaged."""
    opened = open_checkpoint(path)
    for boxes in opened.stored.values():
        for stored in boxes:
            opened.verify(stored)
    return opened
