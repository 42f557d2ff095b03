"""A parameter server as a worker sees it: what lockstep and the other ways have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.comm import Communicator
from unisono.errors import UnisonoError
from unisono.sync.bucket_reduction import under
from unisono.sync.server.client_slice import ClientSlice
from unisono.sync.server.shard_client import ShardCall, ShardClient
from unisono.sync.server.slice_optimizer import flat_as
from unisono.sync.server.slices import Slice
from unisono.sync.synchronizer import BoundSynchronizer


class ServerClient(BoundSynchronizer):
    """See `BoundSynchronizer`. The weights and the optimizer's state are where the servers are; `meet` fetches them.

    A step ends with a request for the new weights. `wait_parameters` copies them into the parameters as the next
    forward pass reaches these, so the last ones arrive while it computes with the first.

    Args:
        conversations: with each shard.
    """

    optimizer_on_server = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        comm: Communicator,
        slices: Sequence[Slice],
        shard_clients: Sequence[ShardClient],
        optimizer: Optimizer,
        overlap: bool,
    ) -> None:
        self.parameters, self.comm, self.optimizer = parameters, comm, optimizer
        self.shard_clients = shard_clients
        self.client_slices = [ClientSlice(i, s, parameters, shard_clients[s.shard]) for i, s in enumerate(slices)]
        self._overlap = self.lazy_parameters = overlap
        self._pending: list[ClientSlice] = []
        self._listening = False
        self._places: dict[str, list[tuple[ClientSlice, int]]] = {name: [] for name in parameters}
        for client_slice in self.client_slices:
            for i, piece in enumerate(client_slice.plan.pieces):
                self._places[piece.span.name].append((client_slice, i))
        self._upload()
        self.begin()

    def _upload(self) -> None:
        """Worker 0 tells the servers what all workers have: weights and optimizer state."""
        if self.comm.rank == 0:
            state = {name: self.optimizer.state.get(parameter, {}) for name, parameter in self.parameters.items()}
            for client_slice in self.client_slices:
                client_slice.init(state).wait()
        self.barrier()

    def barrier(self) -> None:
        """Returns when all workers have come here."""
        self.comm.gather(torch.zeros(1)).wait()

    def begin(self) -> None:
        self.control: list[float] = []
        self._closing = False
        for client_slice in self.client_slices:
            client_slice.begin()

    def close(self, control: list[float], weight: float = 1.0) -> None:
        self.control, self._closing = control, True

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        for client_slice, i in self._places.get(name, ()):  # none, if the optimizer does not train it
            assert client_slice.pull_in_flight is None, f"{name} was not needed before its gradient came"
            if client_slice.pushed is not None:
                raise UnisonoError(
                    f"the gradient of {name} came once more after it was sent: backward ran again before the step was "
                    "taken, or visits this parameter more than once (set overlap=False, or tell world.bind how many "
                    "backward passes make a step)"
                )
            client_slice.add(i, dense, weight)
            if self._closing and self._overlap:
                client_slice.missing.discard(i)
                if not client_slice.missing:
                    self.on_filled(client_slice)

    def fold(self) -> None:
        """`offer` has added them."""

    def on_filled(self, client_slice: ClientSlice) -> None:
        """All gradients of a slice are there, while backward still runs."""

    def request_weights(self, version: int) -> None:
        """Ask for the newest weights, of `version` at least, what the next forward pass needs first before the rest."""
        self.wait_parameters()
        for client_slice in self.client_slices:
            client_slice.request_weights(version)
        self._pending, self._listening = list(self.client_slices), False

    def wait_parameters(self, names: Collection[str] | None = None) -> None:
        if self._pending:
            self._receive(names)

    @torch.no_grad()
    def _receive(self, names: Collection[str] | None) -> None:
        wanted = (
            self._pending
            if names is None
            else [client_slice for name in names for client_slice, _ in self._places.get(name, ())]
        )
        for client_slice in sorted(wanted, key=lambda client_slice: client_slice.number):
            if client_slice.pull_in_flight is not None:
                client_slice.receive()
                self.on_arrived(client_slice)
                self._pending.remove(client_slice)
        if not self._pending:
            self.on_all_arrived()
        elif not self._listening:
            self._listening = True
            for each in self.shard_clients:
                each.listen()

    def on_arrived(self, client_slice: ClientSlice) -> None:
        """The new weights of a slice are here."""

    def on_all_arrived(self) -> None:
        """Those of the last slice that was on its way are here."""

    def finish(self) -> None:
        """Nothing of the steps so far is on its way any more."""
        self.wait_parameters()

    def synchronize(self) -> None:
        """The weights to the bit, and the optimizer's state."""
        self.finish()
        self.barrier()
        for asked in [client_slice.request_exact() for client_slice in self.client_slices]:
            asked.wait()
        self.request_weights(0)
        self.wait_parameters()
        for client_slice, call in [
            (client_slice, client_slice.request_state(state=True)) for client_slice in self.client_slices
        ]:
            self._take_state(client_slice, call)
        self.barrier()

    def averaged_weights(self) -> AbstractContextManager[None]:
        self.finish()
        return self._shared()

    @contextmanager
    def _shared(self) -> Iterator[None]:
        with torch.no_grad():
            self.barrier()
            own = [client_slice.read() for client_slice in self.client_slices]
            for client_slice, call in [
                (client_slice, client_slice.request_state(state=False)) for client_slice in self.client_slices
            ]:
                client_slice.write(call.wait().tensors[0].to(client_slice.plan.device))
            self.barrier()
        try:
            yield
        finally:
            with torch.no_grad():
                for client_slice, flat in zip(self.client_slices, own):
                    client_slice.write(flat)

    def state_dict(self) -> dict[str, Tensor]:
        self.finish()
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """There is nothing to take up but what the parameters and the optimizer have taken up already."""
        self.finish()
        self._upload()

    def residual_state(self) -> dict[str, Tensor]:
        return {
            f"{client_slice.number} of {len(self.client_slices)}/{key}": tensor
            for client_slice in self.client_slices
            for key, tensor in client_slice.memory.state_dict().items()
        }

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        for client_slice in self.client_slices:
            client_slice.memory.load_state_dict(
                under(f"{client_slice.number} of {len(self.client_slices)}", residuals), client_slice.plan.device
            )

    @torch.no_grad()
    def _take_state(self, client_slice: ClientSlice, call: ShardCall) -> None:
        """What a server's optimizer remembers of a slice goes into the local one, as if it had stepped."""
        answer = call.wait()
        for (i, key, like), flat in zip(answer.fields["places"], answer.tensors[1:]):
            piece = client_slice.plan.pieces[i]
            parameter = self.parameters[piece.span.name]
            target = self._slot(parameter, key, like, flat.dtype)
            part = piece.of(target) if like else target
            part.copy_(flat_as(flat, part))

    def _slot(self, parameter: nn.Parameter, key: str, like: bool, dtype: torch.dtype) -> Tensor:
        state: dict[str, Any] = self.optimizer.state[parameter]
        if not isinstance(state.get(key), Tensor):
            if like:
                state[key] = torch.zeros_like(parameter, dtype=dtype)
            else:
                there = self._group(parameter).get("fused") or self._group(parameter).get("capturable")
                state[key] = torch.zeros((), dtype=dtype, device=parameter.device if there else "cpu")
        slot: Tensor = state[key]
        return slot

    def _group(self, parameter: nn.Parameter) -> dict[str, Any]:
        return next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))
