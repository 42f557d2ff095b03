"""Optimizers that look at whole tensors, where workers hold parts of these: each has an owner, who steps it.

         parameters, gradients                     new parameters
all ───────────────────────────► owners: step ────────────────────► all
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.checkpoint import Spec, TensorShard, decode_shards, encode_shards, plan_replicated_writes
from unisono.comm import Communicator
from unisono.comm.text import gather_text
from unisono.elastic.transfer import Route
from unisono.errors import CommunicationError
from unisono.tensors.box import Box
from unisono.trainer.optimizer import build_optimizer


class Wholes:
    """One worker's part in the steps of such an optimizer: see `Stepping`. Owners of tensors that are cut are chosen so
    that each has as many bytes of them. All workers make it alike.

    Attributes:
        optimizer: of what this worker owns, and of what is not cut; the owned parameters are whole while it steps.

    Args:
        make: makes the optimizer.
        local, parts: see `LocalModel`.
        comm: a lane of its own, of the workers of a replica.
        group: the ranks in it of those who hold parts of the same tensors, this one among them.
        undo: whether a step that breaks off for a lost peer leaves nothing behind; what the optimizer remembers is in
            memory twice for that, while it steps.
    """

    def __init__(
        self, make: Callable[[Iterable[nn.Parameter]], Optimizer], local: nn.Module, parts: Mapping[str, Box],
        comm: Communicator, group: Sequence[int], *, undo: bool,
    ) -> None:  # fmt: skip
        self._parameters = {name: p for name, p in local.named_parameters() if p.requires_grad}
        self._undo = undo
        mine = {name: TensorShard(p.dtype, parts[name]) for name, p in self._parameters.items()}
        told = [decode_shards(text) for text in gather_text(comm, encode_shards(mine))]
        held = [told[rank] if rank in group else {} for rank in range(comm.size)]
        cut = {name: each.whole for here in held for name, each in here.items() if not each.box.is_whole}
        owned = owners(cut, group)
        owns = [{name: TensorShard(cut[name].dtype, Box.whole(cut[name].shape)) for name in owned.get(rank, ())}
                for rank in range(comm.size)]  # fmt: skip
        held = [{name: each for name, each in here.items() if name in cut} for here in held]
        device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        self._in, self._out = Route(comm, held, owns, device), Route(comm, owns, held, device)
        self._uncut = self._parameters.keys() - cut.keys()
        stepped = [name for name in self._parameters if name in self._uncut or name in owns[comm.rank]]
        self._parts = {name: Box.whole(parts[name].shape) for name in stepped}
        with self._whole(self._in(self._weights)):
            self.optimizer = build_optimizer(make, [self._parameters[name] for name in stepped])

    @property
    def parts(self) -> Mapping[str, Box]:
        """See `Stepping`."""
        return self._parts

    def step(self, step: Callable[[], Any]) -> Any:
        """See `Stepping`."""
        gradients = self._in({name: p.grad for name, p in self._parameters.items() if p.grad is not None})
        weights = self._in(self._weights)
        undo = self._remembered() if self._undo else None
        with self._whole(weights):
            for name, gradient in gradients.items():
                self._parameters[name].grad = gradient
            result = step()
            stepped = {name: self._parameters[name].detach() for name in weights}
        try:
            arrived = self._out(stepped)
        except CommunicationError:
            if undo:
                undo()
            raise
        with torch.no_grad():
            for name, part in arrived.items():
                self._parameters[name].copy_(part)
        return result

    @property
    def _weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._parameters.items()}

    @contextmanager
    def _whole(self, wholes: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block, parameters are these tensors, and have no gradients yet."""
        parts = {name: self._parameters[name].data for name in wholes}
        try:
            for name, whole in wholes.items():
                self._parameters[name].grad = None  # has the shape of the part
                self._parameters[name].data = whole
            yield
        finally:
            for name, part in parts.items():
                self._parameters[name].grad = None
                self._parameters[name].data = part

    def _remembered(self) -> Callable[[], None]:
        """Puts what the step changes on this worker alone back as it is now."""
        optimizer = self.optimizer
        state = {parameter: copy.deepcopy(kept) for parameter, kept in optimizer.state.items()}
        groups = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        weights = {name: self._parameters[name].detach().clone() for name in self._uncut}

        def undo() -> None:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, before in zip(optimizer.param_groups, groups):
                group.update(before)
            with torch.no_grad():
                for name, weight in weights.items():
                    self._parameters[name].copy_(weight)

        return undo


def owners(cut: Mapping[str, Spec], group: Sequence[int]) -> dict[int, list[str]]:
    """Which of `group`, all of whom hold parts of the tensors `cut`, owns which of these."""
    return dict(zip(group, plan_replicated_writes({name: whole.nbytes for name, whole in cut.items()}, len(group))))
