"""Parameters, gradients and optimizer state sharded over workers: torch's `fully_shard`, block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from unisono.errors import InvalidInput
from unisono.layout.aligned_calls import AlignedCalls, BlockGradients, ExchangeGroups
from unisono.layout.layout import Layout


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    repeated: Sequence[nn.Module],
    layout: Layout,
    *,
    bf16: bool = False,
    last: bool = True,
    apart: Collection[nn.Parameter] = (),
    exchange_groups: ExchangeGroups | None = None,
) -> AlignedCalls:
    """Shard the parameters of `model` over `mesh`, in place. Names do not change, nor do the parameters in `apart`.

    Each block is unsharded when it is called, and resharded as ``layout.zero`` says. All other parameters are unsharded
    together, at the root. The parameters that are gathered together have one dtype: modules with another dtype are
    gathered separately. Gradients of the ranks' micro-batches are summed, not averaged.

    Args:
        mesh: one-dimensional; or two-dimensional, with copies of everything along the first dimension.
        repeated: all blocks in the order of their calls; those outside of `model` have no effect.
        bf16: whether parameters travel and compute in bf16; gradients are then summed in fp32.
        last: whether `model` returns the final output, which is fp32 then.
        apart: parameters that stay as they are.
        exchange_groups: see `AlignedCalls`. None: all workers call the same blocks, so `AlignedCalls` adds no hooks.
    """
    inner, outer = _precision_policy(bf16, None), _precision_policy(bf16, torch.float32 if last else None)
    options = _fully_shard_options(mesh, layout, {*apart, *unshardable(model)})
    names = {module: name for name, module in model.named_modules()}
    blocks = [block for block in repeated if block in names and block is not model]
    inside = [each for group in (*blocks, model) for each in modules_of_other_dtype(group, blocks)]
    if inside and exchange_groups is not None:
        raise InvalidInput(
            "layout", str(layout), f"{names[inside[0]]} has parameters of another dtype than its block, which are "
            "gathered when it is called, and workers may call different modules", "give all modules one dtype, or "
            "let the code call the same modules for all data")  # fmt: skip
    for other in inside:
        fully_shard(other, mp_policy=inner, **options)
    aligned = AlignedCalls(
        model, str(layout), [(names[block], block) for block in blocks], _gradients(model, blocks, apart),
        torch.device(mesh.device_type), exchange_groups or (lambda block: ()))  # fmt: skip
    hooked = nullcontext if exchange_groups is None else aligned.hooks_around
    for block in blocks:
        with hooked(block):
            fully_shard(block, mp_policy=inner, **options)
    with hooked(model):
        fully_shard(model, mp_policy=outer, **options)
    _sum_gradients(model)
    return aligned


def _fully_shard_options(mesh: DeviceMesh, layout: Layout, ignored: set[nn.Parameter]) -> dict[str, Any]:
    return {
        "mesh": mesh,
        "reshard_after_forward": None if layout.zero == 3 else False,  # None: reshard all modules but the root
        "offload_policy": CPUOffloadPolicy() if layout.offload and mesh.device_type != "cpu" else OffloadPolicy(),
        "ignored_params": ignored,
        "shard_placement_fn": partial(shard_placement, mesh.size(mesh.ndim - 1)),
    }


def _sum_gradients(model: nn.Module) -> None:
    """Sum gradients instead of averaging them."""
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        # Some backends (gloo) cannot scale the sum in a reduction.
        module.set_force_sum_reduction_for_comms(True)


def unshardable(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that torch cannot shard, as they have no dimensions or no elements; every worker has them whole."""
    return [parameter for parameter in model.parameters() if parameter.dim() == 0 or parameter.numel() == 0]


def _gradients(
    model: nn.Module, blocks: Sequence[nn.Module], apart: Collection[nn.Parameter]
) -> dict[nn.Module, BlockGradients]:
    """For each separately sharded module, its own parameters."""
    prefixes, seen = {module: name for name, module in model.named_modules()}, set(apart)
    aliases = getattr(model, "alias_names", {})
    found = {}
    for home in (*blocks, model):
        places = []
        for module in home.modules():
            for attribute, parameter in module.named_parameters(recurse=False):
                if parameter not in seen:
                    seen.add(parameter)
                    name = f"{prefixes[module]}.{attribute}".lstrip(".")
                    places.append((aliases.get(name, name), module, attribute))
        found[home] = BlockGradients(places)
    return found


def modules_of_other_dtype(group: nn.Module, blocks: Collection[nn.Module]) -> list[nn.Module]:
    """Modules in `group`, outside of nested `blocks`, whose trained parameters have another dtype than the group.

    The dtype of the group is that of its own trained parameters; if it has none, that of most trained elements in it.

    Raises:
        InvalidInput: a module that itself has several dtypes.
    """
    inside = {m for block in blocks if block is not group for m in block.modules() if group not in block.modules()}
    kinds = {m: _dtype_counts(m) for m in group.modules() if m not in inside}
    sizes = sum(kinds.values(), Counter[torch.dtype]())
    first, *_ = kinds[group] or [kind for kind, _ in sizes.most_common(1)] or [torch.float32]
    for module, found in kinds.items():
        if len(found) > 1:
            names = " and ".join(str(kind).removeprefix("torch.") for kind in found)
            raise InvalidInput(
                "layout", type(module).__name__, f"this module has parameters of {names}, and the parameters of one "
                "module are gathered together", "move them to separate modules, or use one dtype")  # fmt: skip
    return [module for module, found in kinds.items() if module is not group and found and first not in found]


def _dtype_counts(module: nn.Module) -> Counter[torch.dtype]:
    """The number of trained elements in the module's own parameters, by dtype."""
    found = Counter[torch.dtype]()  # in the order of the parameters, which is the same on all ranks
    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad:
            found[parameter.dtype] += parameter.numel()
    return found


def shard_placement(members: int, parameter: nn.Parameter) -> Shard | None:
    """The dimension along which `parameter` is sharded over `members` ranks; None: the first.

    A stack of fewer matrices than ranks (experts) is sharded along another dimension, if one divides evenly.
    """
    size = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
    even = (d for d in range(1, len(size)) if size[d] % members == 0)
    return Shard(next(even, 0)) if len(size) > 2 and size[0] < members else None


def _precision_policy(bf16: bool, output: torch.dtype | None) -> MixedPrecisionPolicy:
    if not bf16:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=output)


class FsdpUnsharding:
    """The `Unsharding` of models that `shard_model` has sharded.

    Args:
        passes: the `AlignedCalls` of each model.
        mesh: the ranks over which the models are sharded.
        may_vary: whether workers may call different blocks, and so use different parameters.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        layout: Layout,
        passes: Sequence[AlignedCalls],
        mesh: DeviceMesh,
        may_vary: bool,
    ) -> None:
        self._models = [model for model in models if isinstance(model, FSDPModule)]
        # A pipeline's schedule knows all micro-batches of a step, and itself sums gradients only once per step.
        self._once = layout.zero == 1 and layout.pipeline == 1
        self._passes, self._mesh = passes, mesh
        self._gradients = [each for one in passes for each in one.gradients.values()]
        self._varying = tuple(name for each in self._gradients for name, *_ in each.slots) if may_vary else ()
        self._known = frozenset(self._varying)
        places = [place for each in self._gradients for place in each.slots]
        self._late = [place for place in places if not isinstance(_parameter(*place), DTensor)]
        self.late = frozenset(name for name, *_ in self._late)

    def connect(self, loss: Tensor) -> Tensor:
        for aligned in self._passes:
            loss = aligned.connect(loss)
        return loss

    def backward(self, last: bool) -> None:
        if self._once:
            for model in self._models:
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)

    def used(self, name: str) -> bool:
        return name not in self._known or any(name in each.used for each in self._gradients)

    def finish(self) -> frozenset[str]:
        whole = [p for p in (_parameter(*place) for place in self._late) if p.grad is not None]
        if not whole and not self._varying:
            return frozenset()
        users = torch.tensor([float(self.used(name)) for name in self._varying])
        counts, *sums = self._summed([users, *(p.grad for p in whole if p.grad is not None)])
        for parameter, gradient in zip(whole, sums):
            parameter.grad = gradient.to(parameter)
        for each in self._gradients:
            each.clear()
        return frozenset(name for name, count in zip(self._varying, counts.tolist()) if not count)

    def _summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Collective: the sums over all ranks that shard these models, in one message."""
        flat = torch.cat([each.reshape(-1).to(self._mesh.device_type, torch.float64) for each in tensors])
        for dim in range(self._mesh.ndim):
            dist.all_reduce(flat, group=self._mesh.get_group(dim))
        return [part.view(each.shape) for part, each in zip(flat.split([each.numel() for each in tensors]), tensors)]

    def reshard(self) -> None:
        for model in self._models:
            for module in _sharded(model):
                module.reshard()


def _parameter(name: str, module: nn.Module, attribute: str) -> nn.Parameter:
    parameter = module._parameters[attribute]
    assert parameter is not None, name
    return parameter


def _sharded(model: nn.Module | FSDPModule) -> list[FSDPModule]:
    assert isinstance(model, nn.Module)
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
