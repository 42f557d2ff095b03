"""A worker's state between two steps, as named tensors and numbers, and how it is sent to workers that lack it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.checkpoint import decode_shards, encode_shards
from unisono.comm import Communicator
from unisono.comm.text import gather_text
from unisono.elastic import transfer as handover
from unisono.elastic.model_state import load_state, state_of, weights_of
from unisono.errors import StateDamaged
from unisono.membership import View
from unisono.tensors.box import Box

_STEPS, _COMMITTED = _RESERVED = "steps", "committed"  # an optimizer's own numbers have a slash in their names


@dataclass(frozen=True)
class Progress:
    """How far a state is: its steps, and what belongs to it besides model and optimizer.

    Args:
        steps: the number of steps that are in model and optimizer.
        committed: the step of the newest complete checkpoint; 0: there is none.
        shared: the synchronizer's state, equal on all replicas.
        loss: the loss of the last of these steps. A view that begins after the last step of a run reports it.
    """

    steps: int = 0
    committed: int = 0
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    loss: float = math.nan


def named_state(
    model: nn.Module, optimizer: Optimizer, progress: Progress
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The state as tensors and numbers, by the names of a checkpoint. The tensors are the model's own."""
    state, numbers = state_of(optimizer, model)
    tensors = {f"model/{name}": tensor.detach() for name, tensor in weights_of(model).items()}
    tensors |= {f"optimizer/{name}": tensor for name, tensor in state.items()}
    tensors |= {f"sync/{name}": tensor for name, tensor in progress.shared.items()}
    return tensors, {**numbers, _STEPS: progress.steps, _COMMITTED: progress.committed}


def load_named_state(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]
) -> Progress:
    """Load the `named_state` of another worker, or of an earlier moment; returns its progress."""
    with torch.no_grad():
        for name, tensor in weights_of(model).items():
            tensor.copy_(tensors[f"model/{name}"])
    own = {name: number for name, number in numbers.items() if name not in _RESERVED}
    load_state(optimizer, model, _under("optimizer/", tensors), own)
    return Progress(int(numbers[_STEPS]), int(numbers[_COMMITTED]), shared_among(tensors))


def shared_among(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The synchronizer's part of a named state, which is equal on all replicas after a synchronization."""
    return _under("sync/", tensors)


def replicated_part(
    tensors: Mapping[str, Tensor], numbers: Mapping[str, float]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The part of a named state that is equal on replicas with local steps after a synchronization."""
    return shared_among(tensors), {name: numbers[name] for name in _RESERVED}


def committed_in(numbers: Mapping[str, float]) -> int:
    """`Progress.committed` of a named state with these numbers."""
    return int(numbers[_COMMITTED])


@dataclass(frozen=True)
class Parts:
    """The boxes of a checkpoint's tensors that one worker has, by the names of the parameters.

    Args:
        weights: the boxes of parameters.
        stepped: the boxes of optimizer state, for the parameters that this worker steps.
    """

    weights: Mapping[str, Box]
    stepped: Mapping[str, Box]

    def of(self, name: str) -> Box | None:
        """The box of a checkpoint's tensor `name`, which is the box of its parameter; None if there is none."""
        kind, _, rest = name.partition("/")
        if kind in ("owed", "kept"):
            return None
        if kind == "optimizer":
            return self.stepped.get(rest.rpartition("/")[0])
        return self.weights.get({"model": rest, "sync": rest.partition("/")[2]}[kind])


@dataclass(frozen=True)
class ReceivedState:
    """The state that a view starts from.

    Args:
        progress: the progress of the state.
        meta: the values that its first source sent with it.
        extra: further tensors of that source; empty on workers that had the state themselves.
    """

    progress: Progress
    meta: Any
    extra: Mapping[str, Tensor] = field(default_factory=dict)


def receive_state(
    view: View, comm: Communicator, model: nn.Module, optimizer: Optimizer, own: Progress | None, meta: Any = None,
    extra: Mapping[str, Tensor] | None = None, *, local_steps: bool = False,
) -> ReceivedState:  # fmt: skip
    """Collective among the members of `view`: its sources send the state from which it starts to all other members.

    Args:
        own: the progress of this worker's state if this worker is a source; else None.
        meta: JSON values that are sent with the state.
        extra: tensors that are sent with the state, and may differ between sources.
        local_steps: whether sources are replicas with local steps. All workers then get the mean of the tensors that
            differ between sources.

    Raises:
        StateDamaged: the received state is not the one that the sources have.
        StateMissing, PeerLost: as `transfer.transfer_tensors`.
    """
    sources = [view.members.index(source) for source in view.sources]
    tensors, numbers = named_state(model, optimizer, own) if own else ({}, {})
    digests = (
        {name: handover.state_digest({name: tensor}, {}) for name, tensor in tensors.items()} if local_steps else {}
    )
    if comm.rank == sources[0]:
        tensors |= {f"{_EXTRA}{name}": tensor for name, tensor in (extra or {}).items()}
    here = handover.LocalTensors(tensors)
    reports = gather_text(comm, json.dumps([encode_shards(here.shards), numbers, meta, digests]) if own else "")
    kinds, numbers, meta, _ = json.loads(reports[sources[0]])
    everything = decode_shards(kinds)
    different = handover.differing([json.loads(reports[source])[-1] for source in sources])
    equal = {} if own else {name: shard for name, shard in everything.items() if name not in different}
    received = handover.transfer_tensors(comm, [here], equal, [place.host for place in view.addresses])
    state = {name: tensor for name, tensor in received.items() if not name.startswith(_EXTRA)}
    if not own and digest_of(state, numbers, local_steps=local_steps) != view.start.digest:
        raise StateDamaged(
            f"the state received for step {view.start.step} has another digest than the sources have reported"
        )
    means = handover.mean_of(comm, tensors, {name: everything[name] for name in different}, sources)
    if not own:
        progress = load_named_state(model, optimizer, state | means, numbers)
        return ReceivedState(progress, meta, _under(_EXTRA, received))
    for name, mean in means.items():  # only now, so that the loss of a worker during the transfer changes no source
        tensors[name].copy_(mean)
    return ReceivedState(own, meta)


def digest_of(tensors: Mapping[str, Tensor], numbers: Mapping[str, float], *, local_steps: bool = False) -> str:
    """The digest of a named state; with local steps, the digest of its replicated part."""
    return handover.state_digest(*(replicated_part(tensors, numbers) if local_steps else (tensors, numbers)))


_EXTRA = "beside/"


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
