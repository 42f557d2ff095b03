"""Headers as whole numbers, and what it means that peers agree.

A record is what travels ahead of each payload::

    verb, sequence, numel, dtype, root, place, to | what I send to each rank | what I expect from each rank

The first part must be equal on all workers. The two others are filled by `exchange` and `swap` only: what one
worker sends another must be what that one expects. A pair's message is one number, ``numel * 256 + dtype +
1``,
and 0 is no message. Every worker sees every record, so all workers find the same disagreement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.comm.communicator import Header
from unisono.errors import MessageMismatch

VERBS = ("sum", "gather", "broadcast", "exchange", "swap", "allocate", "lane", "map")
# The position in this table is the number on the wire.
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
"""How many numbers of a record must be equal on all workers."""


def length(size: int) -> int:
    """How many numbers a record has among `size` workers."""
    return AGREED + 2 * size


def agreed_part(
    verb: str,
    sequence: int,
    numel: int = -1,
    dtype: torch.dtype | None = None,
    root: int = -1,
    place: int = -1,
    to: torch.dtype | None = None,
) -> tuple[int, ...]:
    """What all workers must say alike. `place` is where in the memory that peers share the payload lies,
    or -1; `to` is the dtype of a sum's result."""
    return _VERB_CODES[verb], sequence, numel, _code(dtype), root, place, _code(None if to == dtype else to)


def pairs(size: int, messages: Mapping[int, Tensor]) -> list[int]:
    """One number for each rank: the message that goes to it or comes from it."""
    return [pair(messages[rank]) if rank in messages else 0 for rank in range(size)]


def pair(message: Tensor) -> int:
    """One message between two workers as a number."""
    return message.numel() * 256 + _DTYPE_CODES[message.dtype] + 1


def pair_bytes(number: int) -> int:
    """The bytes of the message that `number` stands for."""
    return (number // 256) * DTYPES[number % 256 - 1].itemsize if number else 0


def check_agreed(parts: Sequence[Sequence[int]]) -> None:
    """Raises `MessageMismatch`, naming both sides, unless all workers' agreed parts are the same."""
    mine = tuple(parts[0])
    for rank, part in enumerate(parts):
        if tuple(part) != mine:
            raise MessageMismatch(f"worker 0: {_words(mine)}; worker {rank}: {_words(part)}")


def check_pairs(sequence: int, verb: str, sends: Sequence[Sequence[int]], expects: Sequence[Sequence[int]]) -> None:
    """Raises `MessageMismatch` unless what each worker sends is what the other expects, for every pair."""
    for one in range(len(sends)):
        for other in range(len(sends)):
            if sends[one][other] != expects[other][one]:
                said, wanted = _message(sends[one][other]), _message(expects[other][one])
                raise MessageMismatch(
                    f"worker {one}: message {sequence}: {verb} of {said} to worker {other}; "
                    f"worker {other}: message {sequence}: {verb} of {wanted} from worker {one}"
                )


def check_root(root: int, size: int) -> None:
    """Raises `ValueError` unless `root` is one of `size` ranks."""
    if not 0 <= root < size:
        raise ValueError(f"root={root}: ranks are 0 to {size - 1}")


def check_everybody(xs: Sequence[Tensor], like: Sequence[Tensor], size: int) -> None:
    """Raises `ValueError` unless there is one tensor for each rank, and one from each."""
    if len(xs) != size or len(like) != size:
        raise ValueError(f"exchange of {len(xs)} for {len(like)} tensors: one for each of {size} workers")


def check_neighbours(xs: Mapping[int, Tensor], like: Mapping[int, Tensor], rank: int, size: int) -> None:
    """Raises `ValueError` unless the same other ranks are sent to and received from."""
    strangers = [other for other in xs if other == rank or not 0 <= other < size]
    if strangers or set(xs) != set(like):
        raise ValueError(f"swap with {sorted(xs)} for {sorted(like)}: the same neighbours, none of them oneself")


def _words(part: Sequence[int]) -> str:
    verb, sequence, numel, dtype, root, place, to = part
    shared = f" in shared memory at {place}" if place >= 0 else ""
    return f"{Header(VERBS[verb], sequence, numel, _name(dtype) or '?', root, _name(to))}{shared}"


def _code(dtype: torch.dtype | None) -> int:
    return -1 if dtype is None else _DTYPE_CODES[dtype]


def _name(code: int) -> str:
    return str(DTYPES[code]).removeprefix("torch.") if code >= 0 else ""


def _message(number: int) -> str:
    if not number:
        return "nothing"
    return f"{number // 256} x {_name(number % 256 - 1)}"
