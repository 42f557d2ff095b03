"""Applies an expert plan: each worker holds whole experts, as DTensors on the ``expert`` mesh."""

from __future__ import annotations

import inspect
import logging
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from unisono.layout.expert.all_to_all import compute_routed
from unisono.layout.expert.expert_plan import ExpertPlan, MixtureSplit

LOG = logging.getLogger("unisono")


def split(model: nn.Module, mesh: DeviceMesh, plan: ExpertPlan) -> list[nn.Module]:
    """Split the mixtures of `plan` that `model` holds, in place, over the 1-D `mesh`; returns them.

    Parameters keep the names and the global shapes of the whole model. Gradients of a rank's experts cover all ranks'
    tokens.
    """
    if mesh.get_rank() == 0:
        LOG.info("split over the expert axis: %s", ", ".join(plan.split))
        for name, why in plan.whole.items():
            LOG.info("%s stays whole: %s", name, why)
    here = set(model.modules())
    mine = [each for each in plan.split.values() if each.module in here]
    for each in mine:
        _split(each, mesh)
    return [each.module for each in mine]


def _split(each: MixtureSplit, mesh: DeviceMesh) -> None:
    each.module.forward = MethodType(_forward(each, mesh), each.module)
    for module in each.module.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(spread, requires_grad=parameter.requires_grad))


def _forward(each: MixtureSplit, mesh: DeviceMesh) -> Any:
    calling, part, group, signature = each.calling, each.part, mesh.get_group(), inspect.signature(each.module.forward)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs)
        asked = calling.read(given)
        mine = part.of(self, _local)
        output = compute_routed(partial(calling.compute, mine, given), asked, part.share, group)
        return output.view_as(given.arguments[calling.tokens])

    return torch.compiler.disable(forward)  # sizes depend on the routing


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
