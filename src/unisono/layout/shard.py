"""Parameters, gradients and optimizer state sharded over workers: torch's `fully_shard`, block by block."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def shard(
    model: nn.Module, mesh: DeviceMesh, apart: Collection[nn.Module] = (), apart_mesh: DeviceMesh | None = None
) -> None:
    """Shard the parameters of `model` over the one-dimensional `mesh`, in place; names stay as they are.

    Each member of a list or sequence of blocks is gathered when it is called and let go after it; what is left
    together, at the root. Gradients of the members' micro-batches add up: nothing is averaged.

    Args:
        apart: modules within `model` that are sharded over `apart_mesh` instead, or not at all: experts, whose
            gradients are of more micro-batches.
    """
    inside = set(model.modules())
    here = [module for module in apart if module in inside]
    for module in here if apart_mesh else ():
        fully_shard(module, mesh=apart_mesh)
    others = {p for module in here for p in module.parameters()} if apart_mesh is None else None
    for block in blocks(model):
        fully_shard(block, mesh=mesh, ignored_params=others)
    fully_shard(model, mesh=mesh, ignored_params=others)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Where a backend cannot scale while it sums (gloo).
            module.set_force_sum_reduction_for_comms(True)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost members of the model's lists and sequences that have parameters: what repeats."""
    if isinstance(model, nn.ModuleList | nn.Sequential):
        return [block for block in model if any(True for _ in block.parameters())]
    return [block for child in model.children() for block in blocks(child)]
