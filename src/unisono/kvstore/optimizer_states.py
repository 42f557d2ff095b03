"""The file of an optimizer's state: safetensors, whose structure is JSON. Nothing in it is executed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint import PlainSafetensors, Spec, open_plain
from unisono.checkpoint.fingerprint import raw_bytes
from unisono.checkpoint.safetensors_format import container, specs_of
from unisono.checkpoint.tensor_stream import write_file
from unisono.elastic.extra_state import from_tensors, to_tensors
from unisono.errors import CheckpointDamaged, CheckpointError
from unisono.system import atomic_files as atomic

_NAME = "optimizer"


class _InMemory:
    """Tensors in memory, as a source of a file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.specs: Mapping[str, Spec] = specs_of(tensors)

    def stream(self, name: str) -> Iterator[memoryview]:
        yield raw_bytes(self._tensors[name])


def save(path: Path, content: Any) -> None:
    """Write `content`, of numbers, texts, tensors, lists and dictionaries; it replaces the file when it is complete.

    Raises:
        CheckpointError: the file cannot be written.
    """
    source = _InMemory(to_tensors(_NAME, content))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        try:
            write_file(temporary, container(source.specs), source)
            atomic.move(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        atomic.sync_directory(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def load(path: Path) -> Any:
    """What `save` has written.

    Raises:
        CheckpointDamaged: there is no such file, or it is not one that `save` has written.
    """
    source = open_plain(path)
    try:
        return from_tensors(_NAME, {name: _read(source, name) for name in source.specs})
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path}: it is not a file of optimizer states") from error


def _read(source: PlainSafetensors, name: str) -> Tensor:
    spec, data = source.specs[name], bytearray()
    for piece in source.stream(name):
        data += piece
    return (
        torch.frombuffer(data, dtype=spec.dtype).view(spec.shape) if data else torch.empty(spec.shape, dtype=spec.dtype)
    )
