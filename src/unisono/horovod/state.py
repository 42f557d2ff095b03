"""Makes parameters and optimizer state equal on all workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.horovod.collectives import broadcast_async_, synchronize
from unisono.horovod.errors import InvalidArgument
from unisono.horovod.objects import broadcast_object
from unisono.horovod.participant import current
from unisono.horovod.process_sets import ProcessSet, global_process_set


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Collective: copy the tensors of worker `root_rank` into those of all members.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or tensors, in the same order on all members.

    Raises:
        InvalidArgument: something else than a tensor.
        HorovodInternalError: members differ in names, dtypes or shapes, or one is lost.
    """
    if isinstance(params, Mapping):
        named: list[tuple[str | None, Any]] = sorted(params.items())
    else:
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    for name, value in named:
        if not isinstance(value, Tensor):
            raise InvalidArgument("params", f"{name}: {type(value).__name__}", "is not a tensor",
                                  "leave it out, or send it by hvd.broadcast_object")  # fmt: skip
    for handle in [broadcast_async_(x, root_rank, name, process_set) for name, x in named]:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Collective: copy the state and the hyperparameters of worker `root_rank`'s optimizer into those of all members.

    As with Horovod, parameters of an optimizer without state have a gradient afterwards, of zeros where they had none.

    Args:
        model: has no effect.

    Raises:
        InvalidInput: a hyperparameter is of a type that cannot be sent; names it.
    """
    needs_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if not optimizer.state and parameter.requires_grad and parameter.grad is None and not needs_sparse:
            parameter.grad = torch.zeros_like(parameter)
    state = broadcast_object(optimizer.state_dict(), root_rank, process_set=process_set)
    if current().rank != root_rank:
        optimizer.load_state_dict(state)
