"""Runs a model on the meta device with real inputs: what depends on inputs alone keeps its values.

Models read some values of their inputs (is this mask all ones? are several sequences packed into one?), and meta
tensors have none. Here only results that depend on weights or buffers are without values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

_META, _REAL = torch.device("meta"), torch.device("cpu")
_RANDOM = torch.Tag.nondeterministic_seeded


class PropagateShapes(TorchDispatchMode):
    """A dispatch mode that computes operations on tensors with known values, on the CPU; all others give only shapes.

    The inputs of one operation may be on the CPU and on the meta device.

    New floating-point tensors on the meta device (the first state of a recurrent layer, a mask of ones) stay there.
    torch requires some of them on the device of the weights. Their values are remembered, and so are values computed
    from them alone. Integers and booleans (positions, masks) move to the CPU.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._overwritten: dict[int, UntypedStorage] = {}  # real storages whose values are no longer known
        self._twins = WeakTensorKeyDictionary()  # real values of tensors on the meta device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        fresh = not given and kwargs.get("device") == _META
        drawn = fresh and torch.Tag.nondeterministic_seeded in func.tags
        if drawn or not all(map(self._is_known, given)):
            self._forget(func, args)
            return _shapes(func, args, kwargs)
        real, named = tree_map(self._real, (args, kwargs))
        numbers = func(*real, **{**named, **({"device": _REAL} if named.get("device") == _META else {})})
        on_meta = fresh or any(x.is_meta for x in given)
        if not on_meta or not any(map(_stays_on_meta, tree_leaves(numbers))):
            return numbers
        return tree_map(self._paired, _shapes(func, args, kwargs), numbers)

    def _paired(self, shape: Any, numbers: Any) -> Any:
        if not _stays_on_meta(numbers):
            return numbers
        if shape.is_meta:
            self._twins[shape] = numbers
        return shape

    def _forget(self, func: Any, args: Any) -> None:
        """Mark the tensors that `func` writes to as unknown."""
        for argument, value in zip(func._schema.arguments, args):
            written = argument.alias_info is not None and argument.alias_info.is_write
            numbers = self._real(value) if written else None
            if isinstance(numbers, Tensor) and not numbers.is_meta:
                storage = numbers.untyped_storage()
                self._overwritten[storage._cdata] = storage

    def _real(self, x: Any) -> Any:
        """The known values of `x` on the CPU; `x` itself if there are none."""
        return self._twins.get(x, x) if isinstance(x, Tensor) and x.is_meta else x

    def _is_known(self, x: Tensor) -> bool:
        numbers = self._real(x)
        return not numbers.is_meta and numbers.untyped_storage()._cdata not in self._overwritten


def _stays_on_meta(found: Any) -> bool:
    """Whether values computed for the meta device are represented there by a shape."""
    return isinstance(found, Tensor) and found.is_floating_point()


def _shapes(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The result of `func` on the meta device; an argument that `func` both writes to and returns is not copied."""
    originals: dict[int, Tensor] = {}

    def shape(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.is_meta:
            return x
        twin = x.to(_META)
        originals[id(twin)] = x
        return twin

    device = {"device": _META} if kwargs.get("device") is not None else {}
    shapes, named = tree_map(shape, (args, dict(kwargs)))
    found = func(*shapes, **{**named, **device})
    return tree_map(lambda x: originals.get(id(x), x) if isinstance(x, Tensor) else x, found)
