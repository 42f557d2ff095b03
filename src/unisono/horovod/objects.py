"""Sends Python values from worker to worker as JSON and tensors. Nothing is pickled, so what arrives runs no code."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from unisono.elastic.extra_state import from_tensors, to_tensors
from unisono.errors import InvalidInput
from unisono.horovod.collectives import allgather
from unisono.horovod.errors import HorovodInternalError
from unisono.horovod.participant import current
from unisono.horovod.process_sets import ProcessSet, global_process_set, membership

_NAME, _ALIGN, _LENGTH_BYTES = "object", 8, 16


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Collective: the `obj` of the worker with the global rank `root_rank`; those of other members do not count.

    Args:
        obj: None, numbers, texts, bytes, tensors, and lists, tuples, sets and dictionaries of them. Tensors arrive on
            the CPU.

    Raises:
        InvalidInput: `obj` has a part of another type; names the part and the type.
        HorovodInternalError: that of another worker has, or a member is lost.
    """
    is_root = current().rank == root_rank
    received = _exchange([obj] if is_root else [], name, process_set)
    return obj if is_root else received[0]


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Collective: the `obj` of all members, in order. Types and errors are those of `broadcast_object`."""
    return _exchange([obj], name, process_set)


def _exchange(own: list[Any], name: str | None, process_set: ProcessSet) -> list[Any]:
    """Collective: the values of all members, each of which sends one or none."""
    membership(process_set)
    refused: InvalidInput | None = None
    data = torch.empty(0, dtype=torch.uint8)
    for value in own:
        try:
            data = _encoded(value, failed=False)
        except InvalidInput as error:  # the other members wait for this one, and are to learn of it
            refused, data = error, _encoded(str(error), failed=True)
    left, values = allgather(data, name, process_set), []
    if refused is not None:
        raise refused
    while left.numel():
        value, left = _decoded(left)
        values.append(value)
    return values


def _encoded(value: Any, *, failed: bool) -> Tensor:
    """The bytes of `value`: the lengths of header and whole, the header, which is JSON, and the tensors.

    Args:
        failed: `value` is the error of a value that cannot be sent.
    """
    tensors = {name: x.cpu().contiguous() for name, x in to_tensors(_NAME, value).items()}
    kinds = [(name, str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in tensors.items()]
    header = json.dumps({"failed": failed, "tensors": kinds}).encode()
    parts = [_padded(torch.frombuffer(bytearray(header), dtype=torch.uint8))]
    parts += [_padded(x.reshape(-1).view(torch.uint8)) for x in tensors.values()]
    whole = _LENGTH_BYTES + sum(each.numel() for each in parts)
    return torch.cat([torch.tensor([len(header), whole]).view(torch.uint8), *parts])


def _decoded(data: Tensor) -> tuple[Any, Tensor]:
    """The first value in `data`, and the bytes after it. Raises `HorovodInternalError` if it could not be sent."""
    header_bytes, whole = data[:_LENGTH_BYTES].clone().view(torch.int64).tolist()
    header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + header_bytes].numpy().tobytes())
    start, tensors = _LENGTH_BYTES + header_bytes + -header_bytes % _ALIGN, {}
    for name, kind, shape in header["tensors"]:
        dtype = getattr(torch, kind)
        nbytes = math.prod(shape) * dtype.itemsize
        tensors[name] = data[start : start + nbytes].clone().view(dtype).view(shape)
        start += nbytes + -nbytes % _ALIGN
    value = from_tensors(_NAME, tensors)
    if header["failed"]:
        raise HorovodInternalError(value)
    return value, data[whole:]


def _padded(data: Tensor) -> Tensor:
    return torch.cat([data, data.new_zeros(-data.numel() % _ALIGN)])
