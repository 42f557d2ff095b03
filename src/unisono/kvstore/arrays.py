"""The arrays and keys that a caller passes: numpy arrays and torch tensors, by integers or texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.errors import InvalidInput
from unisono.kvstore.placement import Part

Key = int | str
Array = np.ndarray[Any, Any] | Tensor
Arrays = Array | Sequence[Array] | Sequence[Sequence[Array]]
"""What belongs to one key, an array or one per device; or a list of these, for a list of keys."""


def grouped(key: Key | Sequence[Key], values: Any, field: str) -> dict[Key, list[Array]]:
    """The arrays of each key, in the order of `key`; those of a key that is named twice are joined.

    Args:
        field: name of the argument `values`, for messages.

    Raises:
        InvalidInput: a key is neither int nor str, keys are of both kinds, or `values` do not fit them.
    """
    keys: list[Any] = list(key) if isinstance(key, list | tuple) else [key]
    each = values if isinstance(key, list | tuple) else [values]
    if not isinstance(each, list | tuple) or len(each) != len(keys):
        given = len(each) if isinstance(each, list | tuple) else type(each).__name__
        raise InvalidInput(field, given, f"there are {len(keys)} keys", "pass a list with one entry for each key")
    found: dict[Key, list[Array]] = {}
    for name, value in zip(keys, each):
        check_key(name)
        found.setdefault(name, []).extend(_arrays(name, value, field))
    if len({type(name) for name in found}) > 1:
        raise InvalidInput("key", keys, "it mixes integers and texts", "use one kind of key in a store")
    return found


def check_key(key: object) -> None:
    """Raises `InvalidInput` unless `key` is an int or a str."""
    if not isinstance(key, int | str) or isinstance(key, bool):
        raise InvalidInput("key", key, f"it is of type {type(key).__name__}", "use an int or a str")


def _arrays(key: Key, value: Any, field: str) -> list[Array]:
    arrays = list(value) if isinstance(value, list | tuple) else [value]
    for each in arrays:
        if not isinstance(each, np.ndarray | Tensor):
            raise InvalidInput(f"{field} of key {key!r}", type(each).__name__, "it is neither a numpy array nor a "
                               "torch tensor", "pass one, or a list with one per device")  # fmt: skip
    if not arrays:
        raise InvalidInput(f"{field} of key {key!r}", value, "it is empty", "pass one array or more")
    return arrays


def dtype_of(array: Array) -> torch.dtype:
    """The torch dtype of `array`. Raises `InvalidInput` if torch has none."""
    if isinstance(array, Tensor):
        return array.dtype
    try:
        return torch.from_numpy(np.empty(0, array.dtype)).dtype
    except (TypeError, ValueError):
        raise InvalidInput("dtype", str(array.dtype), "torch has no such dtype", "convert the array") from None


def check_fits(field: str, array: Array, shape: Sequence[int], given: torch.dtype, taken: torch.dtype) -> None:
    """Raises `InvalidInput` unless `array` has `shape`, and `given` converts to `taken` without another kind of number.

    Args:
        field: name of the array, for messages.
    """
    if tuple(array.shape) != tuple(shape):
        raise InvalidInput(field, list(array.shape), f"the value that is stored has shape {list(shape)}",
                           "pass an array of that shape")  # fmt: skip
    if not torch.can_cast(given, taken):
        raise InvalidInput(field, _name(given), f"it cannot be converted to {_name(taken)}",
                           "use arrays of the stored value's dtype")  # fmt: skip


def check_out(field: str, out: Array, shape: Sequence[int], stored: torch.dtype) -> None:
    """Raises `InvalidInput` unless a value of `shape` and dtype `stored` can be written into `out`."""
    check_fits(field, out, shape, stored, dtype_of(out))
    writeable = out.layout == torch.strided if isinstance(out, Tensor) else out.flags.writeable
    if not writeable:
        raise InvalidInput(field, type(out).__name__, "it is sparse or read-only", "pass a dense array of your own")


def copied(array: Array, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A new contiguous tensor with the elements of `array`; a sparse tensor is made dense."""
    if isinstance(array, Tensor):
        dense = array.detach() if array.layout == torch.strided else array.detach().to_dense()
        return dense.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
    return torch.from_numpy(np.array(array, order="C")).to(device, dtype)


def row_numbers(array: Array, rows: int, field: str) -> Tensor:
    """The different row numbers in `array`, sorted: int64 ``[n]``.

    Raises:
        InvalidInput: one is not a whole number from 0 to ``rows - 1``.
    """
    numbers = copied(array, torch.device("cpu"), torch.float64 if dtype_of(array).is_floating_point else torch.int64)
    found: Tensor = numbers.reshape(-1).unique()
    wrong = found[(found < 0) | (found >= rows) | (found != found.floor())]
    if len(wrong):
        raise InvalidInput(field, wrong[0].item(), f"rows are 0 to {rows - 1}", "pass the numbers of existing rows")
    return found.to(torch.int64)


def rows_of(array: Array, part: Part) -> Any:
    """A view of the rows of `array` that are `part`."""
    return array if part.whole else array[part.start : part.stop]


def write(out: Array, value: Tensor) -> None:
    """Copy `value`, a tensor in host memory, into `out`, which has the same shape."""
    if isinstance(out, Tensor):
        with torch.no_grad():
            out.copy_(value)
    else:
        np.copyto(out, value.to(dtype_of(out)).numpy())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
