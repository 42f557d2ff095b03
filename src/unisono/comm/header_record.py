"""Headers as integers, and the check that they agree on all workers.

A record is sent ahead of each payload::

    verb, sequence, numel, dtype, root, offset, to | messages to each rank | messages expected from each rank

The first part must be equal on all workers. `exchange` and `swap` fill the other two: the message that one worker sends
to another must be the one that the other expects. Each message is written as one number, ``numel * 256 + dtype + 1``,
and 0 stands for no message. Every worker receives every record, so all workers find the same mismatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.comm.communicator import Header
from unisono.errors import MessageMismatch

VERBS = ("sum", "gather", "broadcast", "exchange", "swap", "allocate", "channel", "map")
# The index in this table is the number on the wire: append new dtypes at its end.
DTYPES = tuple(
    getattr(torch, name)
    for name in [
        "float32",
        "float64",
        "bfloat16",
        "float16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "uint16",
        "uint32",
        "uint64",
    ]
)
_VERB_CODES = {verb: code for code, verb in enumerate(VERBS)}
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
AGREED = 7
"""The number of leading integers of a record that must be equal on all workers."""


def length(size: int) -> int:
    """The number of integers in a record of a group of `size`."""
    return AGREED + 2 * size


def agreed_part(
    verb: str,
    sequence: int,
    numel: int = -1,
    dtype: torch.dtype | None = None,
    root: int = -1,
    offset: int = -1,
    to: torch.dtype | None = None,
) -> tuple[int, ...]:
    """The part of a record that must be equal on all workers.

    Args:
        offset: where the payload begins in the memory that peers share; -1 if it is in no such memory.
        to: the dtype of a sum's result; None: `dtype`.
    """
    return _VERB_CODES[verb], sequence, numel, _code(dtype), root, offset, _code(None if to == dtype else to)


def pairs(size: int, messages: Mapping[int, Tensor]) -> list[int]:
    """One number for each rank: the message that `messages` has for this rank, or 0 for none."""
    return [pair(messages[rank]) if rank in messages else 0 for rank in range(size)]


def pair(message: Tensor) -> int:
    """One message between two workers as a number."""
    return message.numel() * 256 + _DTYPE_CODES[message.dtype] + 1


def pair_bytes(number: int) -> int:
    """The bytes of the message that `number` stands for."""
    return (number // 256) * DTYPES[number % 256 - 1].itemsize if number else 0


def check_agreed(parts: Sequence[Sequence[int]]) -> None:
    """Raises `MessageMismatch`, which names both sides, unless `parts`, one of each worker's record, are equal."""
    first = tuple(parts[0])
    for rank, part in enumerate(parts):
        if tuple(part) != first:
            raise MessageMismatch(f"worker 0: {_describe(first)}; worker {rank}: {_describe(part)}")


def check_pairs(sequence: int, verb: str, sends: Sequence[Sequence[int]], expects: Sequence[Sequence[int]]) -> None:
    """Raises `MessageMismatch` unless, for every pair, one worker sends what the other expects."""
    for one in range(len(sends)):
        for other in range(len(sends)):
            if sends[one][other] != expects[other][one]:
                sent, wanted = _message(sends[one][other]), _message(expects[other][one])
                raise MessageMismatch(
                    f"worker {one}: message {sequence}: {verb} of {sent} to worker {other}; "
                    f"worker {other}: message {sequence}: {verb} of {wanted} from worker {one}"
                )


def check_root(root: int, size: int) -> None:
    """Raises `ValueError` unless `root` is one of `size` ranks."""
    if not 0 <= root < size:
        raise ValueError(f"root={root}: ranks are 0 to {size - 1}")


def check_all_ranks(xs: Sequence[Tensor], like: Sequence[Tensor], size: int) -> None:
    """Raises `ValueError` unless `xs` and `like` each have one tensor for every rank."""
    if len(xs) != size or len(like) != size:
        raise ValueError(f"exchange: xs has {len(xs)} tensors, like has {len(like)}; give {size} in each, one per rank")


def check_neighbours(xs: Mapping[int, Tensor], like: Mapping[int, Tensor], rank: int, size: int) -> None:
    """Raises `ValueError` unless `xs` and `like` are for the same ranks, none of which is this worker's."""
    invalid = [other for other in xs if other == rank or not 0 <= other < size]
    if invalid or set(xs) != set(like):
        raise ValueError(
            f"swap: xs is for ranks {sorted(xs)}, like for ranks {sorted(like)}; "
            f"both must name the same ranks from 0 to {size - 1}, without this worker's own, {rank}"
        )


def _describe(part: Sequence[int]) -> str:
    verb, sequence, numel, dtype, root, offset, to = part
    shared = f" in shared memory at {offset}" if offset >= 0 else ""
    return f"{Header(VERBS[verb], sequence, numel, _name(dtype) or '?', root, _name(to))}{shared}"


def _code(dtype: torch.dtype | None) -> int:
    return -1 if dtype is None else _DTYPE_CODES[dtype]


def _name(code: int) -> str:
    return str(DTYPES[code]).removeprefix("torch.") if code >= 0 else ""


def _message(number: int) -> str:
    if not number:
        return "nothing"
    return f"{number // 256} x {_name(number % 256 - 1)}"
