"""All that makes up a worker's state between two steps, as named tensors and numbers: what travels to whoever comes."""

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
    """How far a worker has come.

    Args:
        steps: that are in its model and optimizer.
        committed: the step of the newest checkpoint that lies on disk; 0: none.
        shared: what the synchronizer had beside them.
        loss: of the last of these steps; a view that begins after the very last one takes none, and has it to tell.
    """

    steps: int = 0
    committed: int = 0
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    loss: float = math.nan


def describe(model: nn.Module, optimizer: Optimizer, reached: Progress) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The state, by a checkpoint's names; tensors are the model's own."""
    state, numbers = state_of(optimizer, model)
    tensors = {f"model/{name}": tensor.detach() for name, tensor in weights_of(model).items()}
    tensors |= {f"optimizer/{name}": tensor for name, tensor in state.items()}
    tensors |= {f"sync/{name}": tensor for name, tensor in reached.shared.items()}
    return tensors, {**numbers, _STEPS: reached.steps, _COMMITTED: reached.committed}


def adopt(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]
) -> Progress:
    """Take over what another worker `describe`d."""
    with torch.no_grad():
        for name, tensor in weights_of(model).items():
            tensor.copy_(tensors[f"model/{name}"])
    own = {name: number for name, number in numbers.items() if name not in _RESERVED}
    load_state(optimizer, model, _under("optimizer/", tensors), own)
    return Progress(int(numbers[_STEPS]), int(numbers[_COMMITTED]), shared_among(tensors))


def shared_among(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of a described state is the synchronizer's: the same on all replicas where they meet."""
    return _under("sync/", tensors)


def in_common(
    tensors: Mapping[str, Tensor], numbers: Mapping[str, float]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What of a described state replicas that walk by themselves are sure to have in common where they meet."""
    return shared_among(tensors), {name: numbers[name] for name in _RESERVED}


def committed_in(numbers: Mapping[str, float]) -> int:
    """`Progress.committed` of a state that was described so."""
    return int(numbers[_COMMITTED])


@dataclass(frozen=True)
class Parts:
    """Which boxes of a checkpoint's tensors a worker holds, by the names of their parameters.

    Args:
        weights: of parameters.
        stepped: of what the optimizer remembers of each, where it is this worker's to step.
    """

    weights: Mapping[str, Box]
    stepped: Mapping[str, Box]

    def of(self, name: str) -> Box | None:
        """The part that belongs to a checkpoint's tensor `name`: that of its parameter; None where it has none."""
        kind, _, rest = name.partition("/")
        if kind in ("owed", "kept"):
            return None
        if kind == "optimizer":
            return self.stepped.get(rest.rpartition("/")[0])
        return self.weights.get({"model": rest, "sync": rest.partition("/")[2]}[kind])


@dataclass(frozen=True)
class ReceivedState:
    """What a view starts from.

    Args:
        reached: how far its state has come.
        words: what the first of those who had it says of it.
        beside: what that one has beside it; empty for those who had the state themselves.
    """

    reached: Progress
    words: Any
    beside: Mapping[str, Tensor] = field(default_factory=dict)


def take_over(
    view: View, comm: Communicator, model: nn.Module, optimizer: Optimizer, has: Progress | None, words: Any = None,
    beside: Mapping[str, Tensor] | None = None, *, walks: bool = False,
) -> ReceivedState:  # fmt: skip
    """The state that `view` starts from, on all its members, which call it alike: this worker's own, where it `has`
    that, or what those who have it hand over.

    Args:
        words: of JSON's kinds, about that state.
        beside: tensors that go with it, whose bits need not be the same on all who have it.
        walks: those who have it are replicas that walk by themselves. Of what is not the same on all of them, the mean
            is taken by all.

    Raises:
        StateDamaged: what came is not what its holders have.
        StateMissing, PeerLost: as `handover.transfer_tensors`.
    """
    sources = [view.members.index(source) for source in view.sources]
    tensors, numbers = describe(model, optimizer, has) if has else ({}, {})
    digests = {name: handover.digest({name: tensor}, {}) for name, tensor in tensors.items()} if walks else {}
    if comm.rank == sources[0]:
        tensors |= {f"{_BESIDE}{name}": tensor for name, tensor in (beside or {}).items()}
    here = handover.LocalTensors(tensors)
    told = gather_text(comm, json.dumps([encode_shards(here.shards), numbers, words, digests]) if has else "")
    kinds, numbers, words, _ = json.loads(told[sources[0]])
    everything = decode_shards(kinds)
    apart = handover.differing([json.loads(told[source])[-1] for source in sources])
    alike = {} if has else {name: piece for name, piece in everything.items() if name not in apart}
    received = handover.transfer_tensors(comm, [here], alike, [place.host for place in view.places])
    state = {name: tensor for name, tensor in received.items() if not name.startswith(_BESIDE)}
    if not has and digest_of(state, numbers, walks=walks) != view.start.digest:
        raise StateDamaged(f"what came for step {view.start.step} is not what its holders have")
    means = handover.mean_of(comm, tensors, {name: everything[name] for name in apart}, sources)
    if not has:
        return ReceivedState(adopt(model, optimizer, state | means, numbers), words, _under(_BESIDE, received))
    for name, mean in means.items():  # only now: whoever is lost meanwhile takes nothing along
        tensors[name].copy_(mean)
    return ReceivedState(has, words)


def digest_of(tensors: Mapping[str, Tensor], numbers: Mapping[str, float], *, walks: bool = False) -> str:
    """Of a described state: of all of it, or of what replicas that walk by themselves have in common."""
    return handover.digest(*(in_common(tensors, numbers) if walks else (tensors, numbers)))


_BESIDE = "beside/"


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
