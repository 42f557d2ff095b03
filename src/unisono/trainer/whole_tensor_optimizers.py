"""Steps optimizers that need whole tensors where ranks hold shards: each tensor has an owner, the rank that steps it.

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


class WholeTensorOptimizer:
    """Gathers each sharded tensor on its owner, steps it there, and returns the shards: see `Stepping`.

    Collective to create. Each worker owns about as many bytes of the sharded tensors as any other.

    Attributes:
        optimizer: the optimizer of the parameters that this worker owns or that are not sharded. Parameters that it
            owns are whole while it steps.

    Args:
        make: creates the optimizer.
        local, parts: see `LocalModel`.
        comm: a channel of the workers of a replica that nothing else uses.
        group: the ranks in `comm` that hold shards of the same tensors, including this rank.
        undo: whether to restore parameters and optimizer if a lost peer interrupts a step. This needs a second copy of
            the optimizer's state in memory during a step.
    """

    def __init__(
        self, make: Callable[[Iterable[nn.Parameter]], Optimizer], local: nn.Module, parts: Mapping[str, Box],
        comm: Communicator, group: Sequence[int], *, undo: bool,
    ) -> None:  # fmt: skip
        self._parameters = {name: p for name, p in local.named_parameters() if p.requires_grad}
        self._undo = undo
        mine = {name: TensorShard(p.dtype, parts[name]) for name, p in self._parameters.items()}
        shards = [decode_shards(text) for text in gather_text(comm, encode_shards(mine))]
        held = [shards[rank] if rank in group else {} for rank in range(comm.size)]
        cut = {name: shard.whole for of_rank in held for name, shard in of_rank.items() if not shard.box.is_whole}
        owned = owners(cut, group)
        owns = [{name: TensorShard(cut[name].dtype, Box.whole(cut[name].shape)) for name in owned.get(rank, ())}
                for rank in range(comm.size)]  # fmt: skip
        held = [{name: shard for name, shard in of_rank.items() if name in cut} for of_rank in held]
        device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        self._to_owners, self._from_owners = Route(comm, held, owns, device), Route(comm, owns, held, device)
        self._uncut = self._parameters.keys() - cut.keys()
        stepped = [name for name in self._parameters if name in self._uncut or name in owns[comm.rank]]
        self._parts = {name: Box.whole(parts[name].shape) for name in stepped}
        with self._with_whole_tensors(self._to_owners(self._weights)):
            self.optimizer = build_optimizer(make, [self._parameters[name] for name in stepped])

    @property
    def parts(self) -> Mapping[str, Box]:
        """See `Stepping`."""
        return self._parts

    def step(self, step: Callable[[], Any]) -> Any:
        """See `Stepping`."""
        gradients = self._to_owners({name: p.grad for name, p in self._parameters.items() if p.grad is not None})
        weights = self._to_owners(self._weights)
        undo = self._undo_of_step() if self._undo else None
        with self._with_whole_tensors(weights):
            for name, gradient in gradients.items():
                self._parameters[name].grad = gradient
            result = step()
            stepped = {name: self._parameters[name].detach() for name in weights}
        try:
            returned = self._from_owners(stepped)
        except CommunicationError:
            if undo:
                undo()
            raise
        with torch.no_grad():
            for name, part in returned.items():
                self._parameters[name].copy_(part)
        return result

    @property
    def _weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._parameters.items()}

    @contextmanager
    def _with_whole_tensors(self, whole_tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which the parameters are these whole tensors, and have no gradients at first."""
        parts = {name: self._parameters[name].data for name in whole_tensors}
        try:
            for name, whole in whole_tensors.items():
                self._parameters[name].grad = None  # has the shape of the shard
                self._parameters[name].data = whole
            yield
        finally:
            for name, part in parts.items():
                self._parameters[name].grad = None
                self._parameters[name].data = part

    def _undo_of_step(self) -> Callable[[], None]:
        """A function that undoes what a step changes on this worker, by restoring the present state."""
        optimizer = self.optimizer
        state = {parameter: copy.deepcopy(values) for parameter, values in optimizer.state.items()}
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
    """The names of the tensors that each rank of `group` owns, among those in `cut`, which `group` holds in shards."""
    return dict(zip(group, plan_replicated_writes({name: whole.nbytes for name, whole in cut.items()}, len(group))))
