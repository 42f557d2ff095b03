"""What a worker's optimizer would hold, and what passes between workers so that it can step."""

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
    """What one worker steps.

    Args:
        shapes: names and shapes of the tensors, or of its parts of them.
        messages: of a step, by which that comes to be there, and goes back.
    """

    shapes: tuple[tuple[str, Shape], ...]
    messages: tuple[CollectiveCall, ...] = ()

    @staticmethod
    def parts(parts: Mapping[str, Shape]) -> SteppedTensors:
        """Of a worker that steps what it holds."""
        return SteppedTensors(tuple(parts.items()))

    @staticmethod
    def wholes(leaves: Mapping[str, Tensor], places: RankMesh, rank: int) -> SteppedTensors:
        """Of worker `rank`, where tensors are stepped whole by their owners; see `Wholes`."""
        group = places.along(rank, *SHARDING_AXES)
        held = {name: {other: local_shape(leaf, places, other) for other in group} for name, leaf in leaves.items()}
        whole = {name: tuple(leaf.shape) for name, leaf in leaves.items() if leaf.requires_grad}
        cut = {name: Spec(leaves[name].dtype, shape) for name, shape in whole.items()
               if any(part != shape for part in held[name].values())}  # fmt: skip
        owned = owners(cut, group)[rank]
        there, back = 0.0, 0
        for name, spec in cut.items():
            nbytes = {other: torch.Size(part).numel() * spec.dtype.itemsize for other, part in held[name].items()}
            if name in owned:
                back += sum(nbytes.values()) - nbytes[rank]
            else:  # of those who hold the same part, one sends it
                there += nbytes[rank] * spec.nbytes / sum(nbytes.values())
        to_owners, back_again = CollectiveCall("exchange", group, round(there)), CollectiveCall("exchange", group, back)
        stepped = tuple((name, shape) for name, shape in whole.items() if name not in cut or name in owned)
        return SteppedTensors(stepped, (to_owners, to_owners, back_again))  # weights, gradients; weights


def optimizer_bytes(task: Task, worker: FakeWorker, stepped: SteppedTensors, gradients: Iterable[str]) -> int:
    """Of the state that the task's optimizer has after a step, with gradients of those.

    Where its code looks at numbers it steps one tensor after the other, which then have memory.
    """
    known = dict(worker.held.local.named_parameters())
    tensors = [(known[name], shape, name in gradients) for name, shape in stepped.shapes if known[name].requires_grad]
    try:
        with worker.shapes():
            return _state_bytes(task, tensors)
    except Exception:  # of the user's optimizer
        alike = {(like.dtype, shape, used): _state_bytes(task, [(like, shape, used)]) for like, shape, used in tensors}
        return sum(alike[like.dtype, shape, used] for like, shape, used in tensors)


def _state_bytes(task: Task, tensors: Iterable[tuple[Tensor, Shape, bool]]) -> int:
    """After a step on tensors like these, some of which have gradients."""
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
