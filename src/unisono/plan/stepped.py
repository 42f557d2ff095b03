"""Estimates the optimizer state of a worker, and the messages that its step needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.checkpoint import Spec
from unisono.elastic.model_state import state_of
from unisono.layout import SHARDING_AXES, RankMesh
from unisono.layout.accounting import CollectiveCall
from unisono.layout.fake_worker import FakeWorker
from unisono.layout.shard_sizes import local_shape
from unisono.tasks.task import Task
from unisono.trainer.optimizer import build_optimizer, prefer_fused
from unisono.trainer.whole_tensor_optimizers import owners

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SteppedTensors:
    """The tensors that one worker steps.

    Args:
        shapes: the names and shapes of the tensors, or of the worker's parts of them.
        messages: the messages of a step that gather whole tensors, and return them.
    """

    shapes: tuple[tuple[str, Shape], ...]
    messages: tuple[CollectiveCall, ...] = ()

    @staticmethod
    def parts(parts: Mapping[str, Shape]) -> SteppedTensors:
        """The tensors of a worker that steps its own parts of them."""
        return SteppedTensors(tuple(parts.items()))

    @staticmethod
    def wholes(leaves: Mapping[str, Tensor], places: RankMesh, rank: int) -> SteppedTensors:
        """The tensors of worker `rank` where owners step whole tensors; see `WholeTensorOptimizer`."""
        group = places.along(rank, *SHARDING_AXES)
        held = {name: {other: local_shape(leaf, places, other) for other in group} for name, leaf in leaves.items()}
        whole = {name: tuple(leaf.shape) for name, leaf in leaves.items() if leaf.requires_grad}
        cut = {name: Spec(leaves[name].dtype, shape) for name, shape in whole.items()
               if any(part != shape for part in held[name].values())}  # fmt: skip
        owned = owners(cut, group)[rank]
        gathered, returned = 0.0, 0
        for name, spec in cut.items():
            nbytes = {other: torch.Size(part).numel() * spec.dtype.itemsize for other, part in held[name].items()}
            if name in owned:
                returned += sum(nbytes.values()) - nbytes[rank]
            else:  # of the ranks that hold the same part, one sends it
                gathered += nbytes[rank] * spec.nbytes / sum(nbytes.values())
        to_owners = CollectiveCall("exchange", group, round(gathered))
        from_owners = CollectiveCall("exchange", group, returned)
        stepped = tuple((name, shape) for name, shape in whole.items() if name not in cut or name in owned)
        return SteppedTensors(stepped, (to_owners, to_owners, from_owners))  # weights, gradients; weights


def optimizer_bytes(task: Task, worker: FakeWorker, stepped: SteppedTensors, gradients: Iterable[str]) -> int:
    """The bytes of the optimizer's state after a step in which `gradients` exist.

    If the optimizer's code needs values, it steps one tensor at a time, in memory.
    """
    known = dict(worker.held.local.named_parameters())
    tensors = [(known[name], shape, name in gradients) for name, shape in stepped.shapes if known[name].requires_grad]
    try:
        with worker.shapes():
            return _state_bytes(task, tensors)
    except Exception:  # the user's optimizer may raise anything
        alike = {(like.dtype, shape, used): _state_bytes(task, [(like, shape, used)]) for like, shape, used in tensors}
        return sum(alike[like.dtype, shape, used] for like, shape, used in tensors)


def _state_bytes(task: Task, tensors: Iterable[tuple[Tensor, Shape, bool]]) -> int:
    """The bytes of the optimizer's state after a step on tensors like these, some of which have gradients."""
    model = nn.ParameterList()
    for like, shape, used in tensors:
        parameter = nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))
        parameter.grad = torch.zeros_like(parameter) if used else None
        model.append(parameter)
    optimizer = build_optimizer(task.optimizer, list(model))
    prefer_fused(optimizer, sparse=False)
    optimizer.step()
    state, _ = state_of(optimizer, model)
    return sum(tensor.nbytes for tensor in state.values())
