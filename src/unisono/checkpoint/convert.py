"""Converts checkpoints to and from plain safetensors, one tensor at a time in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from unisono.checkpoint import directory as layout
from unisono.checkpoint.commit import commit_parts
from unisono.checkpoint.manifest import Entry, PartFile, encode_part, part_file
from unisono.checkpoint.ownership import TensorShard
from unisono.checkpoint.part_file import report_file
from unisono.checkpoint.plain_safetensors import INDEX
from unisono.checkpoint.safetensors_format import Spec, container
from unisono.checkpoint.tensor_stream import TensorSource, write_file
from unisono.system import atomic_files as atomic
from unisono.tensors.box import Box


def save_plain(
    source: TensorSource, path: Path, most_bytes: int | None = None, metadata: Mapping[str, str] | None = None
) -> list[Path]:
    """Write all tensors of `source` to a safetensors file, or to several with an index, as transformers reads them:
    ``model-00001-of-00002.safetensors`` … and ``model.safetensors.index.json``. Returns the files.

    The files appear under their names when all are complete, the index last.

    Args:
        path: the path of the file (``model.safetensors``); several files are named after it.
        most_bytes: the most bytes of tensors in one file; a larger tensor has a file of its own. None: one file.
        metadata: further entries of the files' headers.

    Raises:
        CheckpointDamaged: the source is damaged.
        OSError: a file exists already, or cannot be written.
    """
    groups = _groups(source.specs, most_bytes)
    names = {path.with_name(_numbered(path, i, len(groups))): group for i, group in enumerate(groups)}
    index = [path.with_name(path.name + INDEX)] if len(groups) > 1 else []
    for file in [*names, *index]:
        if file.exists():
            raise FileExistsError(17, os.strerror(17), str(file))
    partial = {file: file.with_name(f".{file.name}.tmp") for file in names}
    try:
        for file, group in names.items():
            partial[file].unlink(missing_ok=True)
            write_file(partial[file], container({name: source.specs[name] for name in group}, metadata), source)
        for file in names:
            atomic.move(partial[file], file)
    finally:
        for file in partial.values():
            file.unlink(missing_ok=True)
    for file in index:
        atomic.write_durably(file, _index(source.specs, names))
    atomic.sync_directory(path.parent)
    return [*names, *index]


def store(source: TensorSource, directory: Path, step: int, meta: object) -> Path:
    """Make all tensors of `source` the newest checkpoint of `directory`, as of `step`; returns its path.

    Raises:
        CheckpointDamaged: the source is damaged.
        OSError: the checkpoint cannot be written.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = layout.temporary(directory, step, "converted")
    layout.remove(temporary)
    temporary.mkdir(mode=0o700)
    try:
        file = container(source.specs)
        digests = write_file(temporary / part_file(0), file, source)
        shards = {slot.name: TensorShard(slot.spec.dtype, Box.whole(slot.spec.shape)) for slot in file.slots}
        part = PartFile(file.nbytes, {name: Entry(shard, digests[name]) for name, shard in shards.items()})
        atomic.write_durably(temporary / report_file(0), encode_part(step, part))
        commit_parts(temporary, directory, step, 1, meta)
    finally:
        layout.remove(temporary)
    return directory / layout.step_name(step)


def _groups(specs: Mapping[str, Spec], most_bytes: int | None) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    room = most_bytes
    for name in sorted(specs):
        if room is not None and specs[name].nbytes > room and groups[-1]:
            groups.append([])
            room = most_bytes
        groups[-1].append(name)
        room = None if room is None else room - specs[name].nbytes
    return groups


def _numbered(path: Path, number: int, count: int) -> str:
    return path.name if count == 1 else f"{path.stem}-{number + 1:05d}-of-{count:05d}{path.suffix}"


def _index(specs: Mapping[str, Spec], names: Mapping[Path, Sequence[str]]) -> bytes:
    total = sum(spec.nbytes for spec in specs.values())
    where = {name: file.name for file, group in names.items() for name in group}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True).encode()
