"""Sends Python values from worker to worker as JSON and tensors. Nothing is pickled, so what arrives runs no code."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from unisono.elastic.extra_state import from_tensors, to_tensors
from unisono.horovod.collectives import allgather
from unisono.horovod.process_sets import ProcessSet, global_process_set, membership
from unisono.horovod.session import current

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
        HorovodInternalError: a member is lost.
    """
    is_root = current().rank == root_rank
    membership(process_set)
    received = allgather(_encoded(obj) if is_root else torch.empty(0, dtype=torch.uint8), name, process_set)
    return obj if is_root else _decoded(received)[0]


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Collective: the `obj` of all members, in order. Types and errors are those of `broadcast_object`."""
    left, objects = allgather(_encoded(obj), name, process_set), []
    while left.numel():
        each, left = _decoded(left)
        objects.append(each)
    return objects


def _encoded(value: Any) -> Tensor:
    """The bytes of `value`: the lengths of header and whole, the header, which is JSON, and the tensors."""
    tensors = {name: x.cpu().contiguous() for name, x in to_tensors(_NAME, value).items()}
    kinds = [(name, str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in tensors.items()]
    header = json.dumps(kinds).encode()
    parts = [_padded(torch.frombuffer(bytearray(header), dtype=torch.uint8))]
    parts += [_padded(x.reshape(-1).view(torch.uint8)) for x in tensors.values()]
    whole = _LENGTH_BYTES + sum(each.numel() for each in parts)
    return torch.cat([torch.tensor([len(header), whole]).view(torch.uint8), *parts])


def _decoded(data: Tensor) -> tuple[Any, Tensor]:
    """The first value in `data`, and the bytes after it."""
    header_bytes, whole = data[:_LENGTH_BYTES].clone().view(torch.int64).tolist()
    start, tensors = _LENGTH_BYTES + header_bytes + -header_bytes % _ALIGN, {}
    for name, kind, shape in json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + header_bytes].numpy().tobytes()):
        dtype = getattr(torch, kind)
        nbytes = math.prod(shape) * dtype.itemsize
        tensors[name] = data[start : start + nbytes].clone().view(dtype).view(shape)
        start += nbytes + -nbytes % _ALIGN
    return from_tensors(_NAME, tensors), data[whole:]


def _padded(data: Tensor) -> Tensor:
    return torch.cat([data, data.new_zeros(-data.numel() % _ALIGN)])
