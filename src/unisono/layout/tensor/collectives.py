"""Differentiable collectives of a tensor group (Shoeybi et al. 2019, section 3).

Every result is a separate tensor, never a view, so that a model may change it in place (``ReLU(inplace=True)``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

Function = Callable[..., Tensor]
# renamed in torch: 2.13 deprecates the old name, 2.11 lacks the new one
_gather: Function = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`, which is equal on all ranks, as the input of their parts; backward sums its gradients over ranks."""
    return cast(Function, _CopyToGroup.apply)(x, group)


def sum_over_group(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective: the sum of all ranks' parts, bit-identical on all ranks."""
    return cast(Function, _SumOverGroup.apply)(part, group)


def gather_from_group(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective: all ranks' parts (..., n) as one tensor (..., n * ranks), by rank."""
    return cast(Function, _GatherFromGroup.apply)(part, group)


def scatter_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the last dimension of `x`, which is equal on all ranks; backward gathers."""
    return cast(Function, _ScatterToGroup.apply)(x, group)


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group)))


def _gather_last(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    stacked = collectives.wait_tensor(_gather(part.contiguous().unsqueeze(0), 0, group))
    return torch.cat(tuple(stacked), -1)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _sum(gradients[0], ctx.group), None


class _SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.member, ctx.width = dist.get_rank(group), part.shape[-1]
        return _gather_last(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].narrow(-1, ctx.member * ctx.width, ctx.width), None


class _ScatterToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        width = x.shape[-1] // dist.get_world_size(group)
        return x.narrow(-1, dist.get_rank(group) * width, width).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _gather_last(gradients[0], ctx.group), None
