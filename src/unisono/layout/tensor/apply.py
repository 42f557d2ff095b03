"""Applies a tensor plan: parameters become DTensors under their names, on the ``tensor`` mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional as F

from unisono.layout.deferred.tensor_slots import Slots, tie
from unisono.layout.split_styles import GATHERED, GROUPS, ROWS, SCATTERED, VOCABULARY
from unisono.layout.tensor import attention_heads as heads
from unisono.layout.tensor.collectives import copy_to_group, gather_from_group, scatter_to_group, sum_over_group
from unisono.layout.tensor.linear_modules import Matrix, embedded, matrix
from unisono.layout.tensor.row_exchange import RowExchange
from unisono.layout.tensor.tensor_plan import TensorPlan


def apply(model: nn.Module, mesh: DeviceMesh, plan: TensorPlan) -> None:
    """Split `model` in place over the 1-D `mesh`, whose ranks hold equal weights.

    Parameters keep the names and the global shapes of the whole model. Modules outside of ``plan.split`` keep plain
    parameters, whose gradients are equal on all ranks.

    Raises:
        InvalidInput: a name in the plan that fits no module.
    """
    plan = plan.resolved(model)
    tied = [(getattr(*slots[0]), slots) for slots in Slots(model).tied]
    styles = {name: _style(model.get_submodule(name), word) for name, word in plan.split.items()}
    parallelize_module(model, mesh, dict(styles), src_data_rank=None)
    for before, slots in tied:
        now = (getattr(module, name) for module, name in slots)
        tie(slots, next((each for each in now if each is not before), before))
    for scope, treatment in plan.local.items():
        _apply_treatment(model, scope, treatment, plan, mesh.size())


def _style(module: nn.Module, word: str) -> ParallelStyle:
    return _Vocabulary() if word == VOCABULARY else _MatrixStyle(word)


class _MatrixStyle(ParallelStyle):
    """A matrix split over its outputs or its inputs.

    Torch's own `ColwiseParallel` and `RowwiseParallel` return views, on which models cannot work in place. They support
    neither ``Conv1D`` nor several blocks in one matrix.
    """

    def __init__(self, word: str) -> None:
        self.word = word

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        found, group = cast(Matrix, matrix(module)), device_mesh.get_group()
        if self.word in ROWS:
            _distribute(module, device_mesh, {"weight": 1 - found.output_dimension})
            forward = _row(found.output_dimension, group, self.word == SCATTERED)
        else:
            blocks = RowExchange(found.outputs, GROUPS.get(self.word, 1), device_mesh.size(), dist.get_rank(group))
            _distribute(module, device_mesh, {"weight": found.output_dimension, "bias": 0})
            forward = _column(found.output_dimension, group, blocks, self.word == GATHERED)
        module.forward = MethodType(forward, module)  # bound, so that a copy of the module uses its own weights
        return module


class _Vocabulary(ParallelStyle):
    """An embedding split over its rows; `padding_idx` is a row of the whole embedding."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        first = dist.get_rank(group) * (cast(nn.Embedding, module).num_embeddings // device_mesh.size())
        _distribute(module, device_mesh, {"weight": 0})

        def forward(self: nn.Embedding, input: Tensor) -> Tensor:
            return sum_over_group(embedded(self, _local(self.weight), input, first), group)

        module.forward = MethodType(forward, module)
        return module


def _row(output_dimension: int, group: dist.ProcessGroup, scatter: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    def forward(self: nn.Module, input: Tensor) -> Tensor:
        whole = Matrix(self, output_dimension)
        part = scatter_to_group(input, group) if scatter else input
        total = sum_over_group(F.linear(part, whole.upright(_local(whole.weight))), group)
        return total if whole.bias is None else total + whole.bias

    return forward


def _column(
    output_dimension: int, group: dist.ProcessGroup, blocks: RowExchange, gather: bool
) -> Callable[[nn.Module, Tensor], Tensor]:
    if blocks.groups > 1:
        blocks.prepare()

    def forward(self: nn.Module, input: Tensor) -> Tensor:
        whole = Matrix(self, output_dimension)
        weight, bias = whole.upright(_local(whole.weight)), None if whole.bias is None else _local(whole.bias)
        if blocks.groups > 1:
            weight, bias = blocks.exchange(weight, bias, group)
        part = F.linear(copy_to_group(input, group), weight, bias)
        return gather_from_group(part, group) if gather else part

    return forward


def _distribute(module: nn.Module, mesh: DeviceMesh, dimensions: Mapping[str, int]) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if name in dimensions:
            sharded = distribute_tensor(parameter, mesh, [Shard(dimensions[name])], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _apply_treatment(model: nn.Module, scope: str, treatment: str, plan: TensorPlan, degree: int) -> None:
    module = model.get_submodule(scope)
    if treatment == "attributes":
        heads.divide(module, degree)
        return
    inside = [word for name, word in plan.split.items() if name.startswith(f"{scope}." if scope else "")]
    mode = heads.local_mode(module, degree, (GROUPS[word] for word in inside if word in GROUPS))
    module.forward = MethodType(heads.localized(module, mode), module)
