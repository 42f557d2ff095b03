"""The tensors of a batch in nested lists, tuples, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from unisono.errors import InvalidInput

Batch = Any


def tensors(batch: Batch) -> Iterator[Tensor]:
    """All tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    for part in parts(batch):
        yield from tensors(part)


def mapped(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """A copy of `batch` with ``function(tensor)`` for every tensor.

    Containers keep their type; immutable mappings become dicts.
    """
    return _rebuilt(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A copy of `batch` on `device`: tensors, and other objects with a method ``to(device)``."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf

    return _rebuilt(move, batch)


def samples_in(batch: Batch) -> int:
    """The number of samples in a batch: the length of its first tensor or array that has one.

    For packed sequences it is the number of sequences. In a batch without tensors it is the length of its first list,
    or its own length.

    Raises:
        InvalidInput: nothing in the batch has a length.
    """
    for leaf in _leaves(batch):
        if isinstance(leaf, PackedSequence):
            return int(leaf.batch_sizes[0])
        if len(getattr(leaf, "shape", ())):
            return len(leaf)
    try:
        return _length(batch)
    except TypeError:
        raise InvalidInput(
            "batch", type(batch).__name__, "the number of its samples is not known, as it holds no tensor with a row "
            "for each sample", "have collate put such a tensor first, or give Task(weight=...)") from None  # fmt: skip


def _length(batch: Batch) -> int:
    inside = parts(batch)
    if inside and (not _is_sequence(batch) or parts(inside[0])):
        return _length(inside[0])
    if isinstance(batch, str | Mapping):
        raise TypeError("its length is no number of samples")
    return len(batch)


def _leaves(batch: Batch) -> Iterator[Any]:
    inside = [] if isinstance(batch, PackedSequence) else parts(batch)
    if not inside:
        yield batch
    for part in inside:
        yield from _leaves(part)


def parts(batch: Batch) -> list[Any]:
    """The elements of a container; empty for any other object."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, list | tuple):
        return list(batch)
    return [getattr(batch, name) for name in _fields(batch)]


def _is_sequence(batch: Batch) -> bool:
    """Whether `batch` is a list or tuple, but not a named tuple, which is a record."""
    return isinstance(batch, list | tuple) and not hasattr(batch, "_fields")


def _fields(batch: Batch) -> list[str]:
    """The field names of a dataclass instance; empty for any other object."""
    if isinstance(batch, type) or not dataclasses.is_dataclass(batch):
        return []
    return [field.name for field in dataclasses.fields(batch)]


def _rebuilt(change: Callable[[Any], Any], batch: Batch) -> Batch:
    """`batch` with every leaf replaced by ``change(leaf)``; packed sequences are leaves."""
    if isinstance(batch, PackedSequence):
        return change(batch)
    if isinstance(batch, Mapping):
        return _with_items(batch, {key: _rebuilt(change, value) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        inside = (_rebuilt(change, part) for part in batch)
        return type(batch)(inside) if _is_sequence(batch) else type(batch)(*inside)
    if names := _fields(batch):
        return _with_fields(batch, {name: _rebuilt(change, getattr(batch, name)) for name in names})
    return change(batch)


def _with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """A copy of `mapping`, including its further attributes, with the values in `items`."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return items
    made = copy.copy(mapping)
    for key, value in items.items():
        made[key] = value
    return made


def _with_fields(record: Any, fields: dict[str, Any]) -> Any:
    made = copy.copy(record)
    for name, value in fields.items():
        object.__setattr__(made, name, value)  # it may be frozen
    return made
