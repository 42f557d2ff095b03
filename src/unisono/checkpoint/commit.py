"""Turns the part files of all workers into a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unisono.checkpoint import directory as layout
from unisono.checkpoint.manifest import PartFile, decode_part, encode_manifest, merged, part_file
from unisono.checkpoint.part_file import report_file
from unisono.errors import CheckpointError
from unisono.system.atomic_files import sync_directory, write_durably


def commit_parts(temporary: Path, directory: Path, step: int, size: int, meta: Any) -> int:
    """Make the `size` part files in `temporary` the newest checkpoint of `directory`; returns its bytes.

    It writes the manifest, renames the directory and writes ``LATEST``; each is on disk before the next begins.

    Raises:
        CheckpointError: a part is missing or of another step, or the parts do not cover whole tensors.
        OSError: a file cannot be written.
    """
    parts = [_complete(temporary, rank, step) for rank in range(size)]
    try:
        manifest = encode_manifest(merged(step, meta, parts))
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if len(manifest) > layout.JSON_LIMIT:
        raise CheckpointError(
            f"the manifest has {len(manifest)} bytes, and a manifest above {layout.JSON_LIMIT} bytes would not be read"
        )
    write_durably(temporary / layout.MANIFEST, manifest)
    for rank in range(size):
        (temporary / report_file(rank)).unlink()
    sync_directory(temporary)
    layout.put_in_place(temporary, directory, step)
    layout.write_latest(directory, step)
    return sum(part.nbytes for part in parts)


def _complete(temporary: Path, rank: int, step: int) -> PartFile:
    try:
        written, part = decode_part(layout.read_small(temporary / report_file(rank), layout.JSON_LIMIT))
        length = (temporary / part_file(rank)).stat().st_size
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointError(f"the part of worker {rank} is not complete ({error})") from None
    if (written, length) != (step, part.nbytes):
        found, expected = f"step {written} and {length} bytes", f"step {step} and {part.nbytes} bytes"
        raise CheckpointError(f"the part of worker {rank} is of {found}, where it should be of {expected}")
    return part
