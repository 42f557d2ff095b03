"""The record of a model's construction as a value: operations on numbered storages, which have no memory yet."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage


@dataclass(frozen=True)
class TensorView:
    """A tensor, described as a view of the storage with this number on the tape; strides and offset are in elements."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, storage: int) -> TensorView:
        """`tensor`, described as a view of the storage with this number."""
        return cls(storage, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def on(self, storage: UntypedStorage) -> Tensor:
        """This view of `storage`, as a tensor on the device of `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def blank(self, device: str) -> Tensor:
        """A tensor of this geometry with undefined content and its own storage."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)

    def covers(self, nbytes: int) -> bool:
        """Whether this view covers every byte of a storage of `nbytes` exactly once."""
        elements = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1 and stride != elements:
                return False
            elements *= size
        return elements * self.dtype.itemsize == nbytes


@dataclass(frozen=True)
class GeometryOnly:
    """An argument of which only shape, strides and dtype are read, as in ``zeros_like``."""

    view: TensorView


@dataclass(frozen=True)
class Draw:
    """Random numbers drawn from a generator.

    Args:
        generator: the source of the numbers.
        start: the generator's state before the draw, or the number of the earlier draw that left it in that state.
    """

    generator: torch.Generator
    start: Tensor | int


@dataclass(frozen=True)
class TapeOperation:
    """One call of an operator, with a `TensorView` in place of each tensor argument.

    Args:
        call: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
        fresh: for each returned tensor, its view if it is in new memory.
        reads: storages whose content before the call matters.
        writes: storages that the call changes; those not in `reads` are completely overwritten.
        draw: the random numbers that the call draws; None without any.
        default_dtype: torch's default dtype at the call.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: tuple[TensorView | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    draw: Draw | None
    default_dtype: torch.dtype


@dataclass
class Tape:
    """Recorded operations in order, and the storages on which they work.

    Args:
        operations: the operations, in the order of their calls; the index of one is its number.
        storages: placeholders on the meta device (no memory), by number.
        writers: for each storage, the numbers of the operations that write to it, ascending.
        states: states of generators after operations, by number of the operation, where they are known.
    """

    operations: list[TapeOperation] = field(default_factory=list)
    storages: list[UntypedStorage] = field(default_factory=list)
    writers: list[list[int]] = field(default_factory=list)
    states: dict[int, Tensor] = field(default_factory=dict)

    def add_storage(self, placeholder: UntypedStorage) -> int:
        """Append a storage; returns its number."""
        self.storages.append(placeholder)
        self.writers.append([])
        return len(self.storages) - 1

    def add(self, operation: TapeOperation) -> None:
        """Append an operation."""
        for storage in operation.writes:
            self.writers[storage].append(len(self.operations))
        self.operations.append(operation)

    def add_content(self, storage: int, content: UntypedStorage) -> None:
        """Append a copy of `content` into the storage, of the same size. `content` must not change any more."""
        place = TensorView(storage, torch.uint8, (content.nbytes(),), (1,), 0)
        value = torch.empty(0, dtype=torch.uint8).set_(content)
        copy, writes = torch.ops.aten.copy_.default, frozenset({storage})
        self.add(TapeOperation(copy, (place, value), {}, (None,), frozenset(), writes, None, torch.float32))

    def last_writer(self, storage: int, before: int) -> int | None:
        """The last operation before `before` that wrote to the storage."""
        writers = self.writers[storage]
        found = bisect_left(writers, before)
        return writers[found - 1] if found else None


def map_leaves(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """`value` with `leaf` applied to every item in its lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        return type(value)([map_leaves(item, leaf) for item in value])
    if isinstance(value, dict):
        return {key: map_leaves(item, leaf) for key, item in value.items()}
    return leaf(value)


def leaves(value: Any, kind: type | tuple[type, ...]) -> Iterator[Any]:
    """Every item of a kind in lists, tuples and dicts, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item, kind)
    elif isinstance(value, dict):
        yield from leaves(tuple(value.values()), kind)
    elif isinstance(value, kind):
        yield value
