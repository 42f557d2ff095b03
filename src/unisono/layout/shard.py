"""Parameters, gradients and optimizer state sharded over workers: torch's `fully_shard`, block by block."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard


def shard(model: nn.Module, mesh: DeviceMesh, apart: Iterable[nn.Parameter] = ()) -> None:
    """Shard the parameters of `model` over the one-dimensional `mesh`, in place; names stay as they are, and those
    `apart` as they lie.

    Each member of a list or sequence of blocks is gathered when it is called and let go after it; what is left
    together, at the root. Gradients of the members' micro-batches add up: nothing is averaged.
    """
    left, place = set(apart), partial(placed, mesh.size(mesh.ndim - 1))
    for block in blocks(model):
        fully_shard(block, mesh=mesh, ignored_params=left, shard_placement_fn=place)
    fully_shard(model, mesh=mesh, ignored_params=left, shard_placement_fn=place)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Where a backend cannot scale while it sums (gloo).
            module.set_force_sum_reduction_for_comms(True)


def placed(members: int, parameter: nn.Parameter) -> Shard | None:
    """Where `parameter` is sharded over `members`: None, along the first dimension, but for a stack of fewer matrices
    than there are members (experts)."""
    size = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
    even = (d for d in range(1, len(size)) if size[d] % members == 0)
    return Shard(next(even, 0)) if len(size) > 2 and size[0] < members else None


def blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost members of the model's lists and sequences that have parameters: what repeats."""
    if isinstance(model, nn.ModuleList | nn.Sequential):
        return [block for block in model if any(True for _ in block.parameters())]
    return [block for child in model.children() for block in blocks(child)]
