"""Reduction operators, and the reduction of a flat tensor over a group with any of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.compress import Span
from unisono.horovod.groups import Group, Steps
from unisono.horovod.requests import ADDITIVE
from unisono.sync.adasum import combined


class ReduceOp(IntEnum):
    """How tensors of several workers become one; Horovod's numbers.

    `Average` of whole numbers is rounded towards zero. `Adasum` is that of `unisono.sync.adasum`, for each tensor.
    """

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product
_COMBINE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(ADDITIVE, torch.add),
    Min.name: torch.minimum,
    Max.name: torch.maximum,
    Product.name: torch.mul,
}


def reduce(group: Group, flat: Tensor, op: str, spans: Sequence[Span]) -> Steps[Tensor]:
    """Collective: the reduction of the members' `flat`, which may be overwritten. `Average` is not divided here.

    Args:
        spans: the ranges of single tensors in `flat`.
    """
    if op == Adasum.name:
        nodes: list[Tensor] = list((yield from group.gather(flat)))
        while len(nodes) > 1:  # the tree of `unisono.sync.adasum`
            odd = nodes[-1:] if len(nodes) % 2 else []
            nodes = [combined(a, b, spans) for a, b in zip(nodes[0::2], nodes[1::2])] + odd
        return nodes[0]
    if op in ADDITIVE and (total := group.sum(flat)) is not None:
        return (yield total)  # type: ignore[no-any-return]
    padded = F.pad(flat, (0, -flat.numel() % group.size))
    mine = yield from reduce_scatter(group, padded.tensor_split(group.size), op)
    rows = yield from group.gather(mine)
    return rows.reshape(-1)[: flat.numel()]


def reduce_scatter(group: Group, pieces: Sequence[Tensor], op: str) -> Steps[Tensor]:
    """Collective: the reduction of this member's piece, in the order of members. `Average` is not divided here."""
    own = pieces[group.rank]
    received = yield from group.exchange(pieces, [own] * group.size)
    return functools.reduce(_COMBINE[op], received)


def scaled(x: Tensor, factor: float) -> Tensor:
    """``factor * x`` in the dtype of `x`; whole numbers are multiplied in float64, and rounded towards zero."""
    if factor == 1.0:
        return x
    return x * factor if x.is_floating_point() else (x.double() * factor).to(x.dtype)


def averaged(total: Tensor, size: int) -> Tensor:
    """``total / size`` in the dtype of `total`; whole numbers are rounded towards zero."""
    return total / size if total.is_floating_point() else torch.div(total, size, rounding_mode="trunc")
