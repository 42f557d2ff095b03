"""What a worker asks the others to do together with it, and whether the requests of several workers fit each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

ALLREDUCE, ALLGATHER, BROADCAST = "allreduce", "allgather", "broadcast"
ALLTOALL, REDUCESCATTER, BARRIER, JOIN = "alltoall", "reducescatter", "barrier", "join"
ADD_SET, REMOVE_SET, FIX_ORDER = "add_process_set", "remove_process_set", "fix_order"
ADDITIVE = ("Average", "Sum")
"""The operators for which a worker without a tensor contributes zeros."""
_OWN_NUMBERS = (ALLTOALL, FIX_ORDER)  # verbs whose numbers may differ between members
EVERYBODY = 0
"""The number of the process set that all workers belong to."""
Key = tuple[int, str]
"""A process set and a name in it: what identifies requests that belong together."""


@dataclass(frozen=True)
class Request:
    """What one worker submits for one or several tensors of a dtype.

    Args:
        name: with `members`, identifies the requests of several workers that belong together.
        members: the number of a process set.
        shapes: of the tensors, in order.
        op: of a reduction.
        root: the global rank that a broadcast comes from; -1 elsewhere.
        prescale, postscale: factors before and after a reduction.
        device: the type of device that the tensors are on.
        compress: the compressor of a mean, in the notation; empty: none.
        numbers: for an alltoall the rows for each member; for a new process set its ranks; for the removal of one its
            number; for a fixed order its digest, and those that this worker does not need any more.
    """

    name: str
    verb: str
    members: int = EVERYBODY
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = "cpu"
    compress: str = ""
    numbers: tuple[int, ...] = ()

    @property
    def key(self) -> Key:
        """What identifies this request."""
        return self.members, self.name

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the tensors."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"dtype={self.dtype!r} is none of torch")
        return found

    def zeros(self) -> list[Tensor]:
        """What a worker contributes that has not submitted this request."""
        return [torch.zeros(shape, dtype=self.torch_dtype, device=self.device) for shape in self.shapes]


@dataclass(frozen=True)
class Agreed:
    """A request that all members have submitted, or that failed.

    Args:
        parts: of each member, what may differ: the first dimensions for an allgather, the rows for each member for an
            alltoall.
        error: why it is not executed; empty: it is.
        lost: whether it is not since a worker is lost or has shut down.
        result: for a broadcast, the member that it comes from; for a join, the rank that joined last; for a new process
            set, its number; for a fixed order, whether all workers have submitted the same, as 1 or 0.
    """

    request: Request
    parts: tuple[tuple[int, ...], ...] = ()
    error: str = ""
    lost: bool = False
    result: int = -1


REQUESTS, AGREEMENTS = TypeAdapter(list[Request]), TypeAdapter(list[Agreed])


def to_bytes(adapter: TypeAdapter[Any], values: Sequence[Any]) -> Tensor:
    """`values` as JSON in a tensor of uint8."""
    return torch.frombuffer(bytearray(adapter.dump_json(list(values))), dtype=torch.uint8)


def from_bytes(adapter: TypeAdapter[Any], data: Tensor) -> Any:
    """The inverse of `to_bytes`. Raises `ValueError` for anything else."""
    return adapter.validate_json(data.numpy().tobytes())


def part(request: Request) -> tuple[int, ...]:
    """What of `request` may differ between members."""
    if request.verb == ALLGATHER:
        return tuple(shape[0] for shape in request.shapes)
    return request.numbers if request.verb in _OWN_NUMBERS else ()


def difference(requests: Mapping[int, Request]) -> str:
    """A sentence about the first difference between the requests of two workers, by rank; empty: they fit."""
    (first, one), *others = requests.items()
    for rank, other in others:
        if other == one:
            continue
        for field in fields(Request):
            mine, theirs = _agreed_part(one, field.name), _agreed_part(other, field.name)
            if mine != theirs:
                what, shown = field.name.removesuffix("s"), (_shown(one, field.name), _shown(other, field.name))
                values = f"worker {first} has {what} {shown[0]}, worker {rank} {shown[1]}"
                return f"{one.name}: {values}; let all workers submit the same"
    return ""


def _agreed_part(request: Request, field: str) -> Any:
    """The part of a field's value that must be equal on all members."""
    value = getattr(request, field)
    if field == "shapes" and request.verb in (ALLGATHER, ALLTOALL):
        return [shape[1:] for shape in value]
    return () if field == "numbers" and request.verb in _OWN_NUMBERS else value


def _shown(request: Request, field: str) -> str:
    value = getattr(request, field)
    if field == "shapes":
        return ", ".join(str(list(shape)) for shape in value)
    return str(value) or "none"
