"""Parameters, gradients and optimizer state sharded over workers: torch's `fully_shard`, block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from unisono.errors import InvalidInput
from unisono.layout.layout import Layout


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    repeated: Collection[nn.Module],
    layout: Layout,
    *,
    bf16: bool = False,
    last: bool = True,
    apart: Collection[nn.Parameter] = (),
) -> None:
    """Shard the parameters of `model` over `mesh`, in place; names stay as they are, and those `apart` as they lie.

    Each block is gathered when it is called and let go as ``layout.zero`` says; what is left together, at the root.
    What lies together is of one dtype: modules with parameters of another are gathered by themselves. Gradients of the
    members' micro-batches add up: nothing is averaged.

    Args:
        mesh: of one dimension; or of two, over the first of which everything is there several times.
        repeated: the blocks, some of which are in `model`.
        bf16: parameters travel and compute in bf16; gradients are summed in fp32.
        last: whether the model's output leaves here, which then is fp32.
    """
    offload = CPUOffloadPolicy() if layout.offload and mesh.device_type != "cpu" else OffloadPolicy()
    inner, outer = _numbers(bf16, None), _numbers(bf16, torch.float32 if last else None)
    let_go = None if layout.zero == 3 else False  # None: all but the root
    given: dict[str, Any] = {
        "mesh": mesh, "reshard_after_forward": let_go, "offload_policy": offload, "ignored_params": set(apart),
        "shard_placement_fn": partial(placed, mesh.size(mesh.ndim - 1)),
    }  # fmt: skip
    blocks = [m for m in model.modules() if m in repeated and m is not model]
    for block in [*(other for group in (*blocks, model) for other in others(group, blocks)), *blocks]:
        fully_shard(block, mp_policy=inner, **given)
    fully_shard(model, mp_policy=outer, **given)
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        # Where a backend cannot scale while it sums (gloo).
        module.set_force_sum_reduction_for_comms(True)


def others(group: nn.Module, blocks: Collection[nn.Module]) -> list[nn.Module]:
    """The modules in `group`, but for those in `blocks` further in, that have parameters to train of another dtype than
    it has itself, or than most of its numbers.

    Raises:
        InvalidInput: a module that has several dtypes itself.
    """
    inside = {m for block in blocks if block is not group for m in block.modules() if group not in block.modules()}
    kinds = {m: _kinds(m) for m in group.modules() if m not in inside}
    sizes = sum(kinds.values(), Counter[torch.dtype]())
    first, *_ = kinds[group] or [kind for kind, _ in sizes.most_common(1)] or [torch.float32]
    for module, found in kinds.items():
        if len(found) > 1:
            names = " and ".join(str(kind).removeprefix("torch.") for kind in found)
            raise InvalidInput(
                "layout", type(module).__name__, f"this module holds parameters of {names} itself, and those of one "
                "module are gathered together", "give them modules of their own, or one dtype")  # fmt: skip
    return [module for module, found in kinds.items() if module is not group and found and first not in found]


def _kinds(module: nn.Module) -> Counter[torch.dtype]:
    """How many numbers that are trained the module holds itself, by dtype."""
    found = Counter[torch.dtype]()  # in the order of the parameters, which all workers have alike
    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad:
            found[parameter.dtype] += parameter.numel()
    return found


def placed(members: int, parameter: nn.Parameter) -> Shard | None:
    """Where `parameter` is sharded over `members`: None, along the first dimension, but for a stack of fewer matrices
    than there are members (experts)."""
    size = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
    even = (d for d in range(1, len(size)) if size[d] % members == 0)
    return Shard(next(even, 0)) if len(size) > 2 and size[0] < members else None


def _numbers(bf16: bool, output: torch.dtype | None) -> MixedPrecisionPolicy:
    if not bf16:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=output)


class Gathered:
    """Whole parameters and gradients of sharded `models`, inside a step and between two; see `Gathering`."""

    def __init__(self, models: Sequence[nn.Module], layout: Layout) -> None:
        self._models = [model for model in models if isinstance(model, FSDPModule)]
        # A pipeline's schedule has all micro-batches in hand, and sums once per step by itself.
        self._once = layout.zero == 1 and layout.pipeline == 1

    def backward(self, last: bool) -> None:
        """See `Gathering`."""
        if self._once:
            for model in self._models:
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)

    def let_go(self) -> None:
        """See `Gathering`."""
        for model in self._models:
            for module in _sharded(model):
                module.reshard()


def _sharded(model: nn.Module | FSDPModule) -> list[FSDPModule]:
    assert isinstance(model, nn.Module)
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
