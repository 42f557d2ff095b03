"""The file of an optimizer's state: safetensors, whose structure is JSON. Nothing in it is executed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from unisono.kvstore.arrays import Key
from unisono.system import atomic_files as atomic

_NAME = "optimizer"


@dataclass(frozen=True)
class OptimizerState:
    """The state of the optimizer of one value.

    Args:
        shape: of the value.
        state: of its parameter, as in the optimizer's ``state_dict()``.
        groups: hyperparameters, as in its ``param_groups``; empty where they are not saved.
    """

    shape: tuple[int, ...]
    state: dict[str, Any]
    groups: list[dict[str, Any]]

    def __post_init__(self) -> None:
        """Raises TypeError for values of other types."""
        if not all(type(n) is int for n in self.shape) or not isinstance(self.state, dict):
            raise TypeError(f"shape {self.shape!r}, state of type {type(self.state).__name__}")
        if not isinstance(self.groups, list) or not all(isinstance(each, dict) for each in self.groups):
            raise TypeError("groups are a list of dictionaries")


class _InMemory:
    """Tensors in memory, as a source of a file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.specs: Mapping[str, Spec] = specs_of(tensors)

    def stream(self, name: str) -> Iterator[memoryview]:
        yield raw_bytes(self._tensors[name])


def save(path: Path, states: Mapping[Key, OptimizerState]) -> None:
    """Write the state of each key's optimizer. An existing file is replaced when the new one is complete.

    Raises:
        CheckpointError: the file cannot be written.
        InvalidInput: a state has values that are neither numbers, texts, tensors, nor lists or dictionaries of them.
    """
    source = _InMemory(to_tensors(_NAME, {key: vars(each) for key, each in states.items()}))
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


def load(path: Path) -> dict[Key, OptimizerState]:
    """What `save` has written.

    Raises:
        CheckpointDamaged: there is no such file, or it is not one that `save` has written.
    """
    source = open_plain(path)
    try:
        content = from_tensors(_NAME, {name: _read(source, name) for name in source.specs})
        return {key: OptimizerState(**each) for key, each in content.items()}
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path}: it is not a file of optimizer states") from error


def _read(source: PlainSafetensors, name: str) -> Tensor:
    spec, data = source.specs[name], bytearray()
    for piece in source.stream(name):
        data += piece
    return (
        torch.frombuffer(data, dtype=spec.dtype).view(spec.shape) if data else torch.empty(spec.shape, dtype=spec.dtype)
    )
