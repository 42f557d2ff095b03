"""The worker's client of parameter servers: the base class of the synchronous and the asynchronous client."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Servers:
    """The servers to which a replica is connected, and the parameters that they train.

    Args:
        parameters: by name, the parameters that `optimizer` trains.
        comm: a channel of all workers.
        slices: the plan of all slices.
        shard_clients: the client of each shard.
        overlap: whether gradients and weights are in flight while backward and forward run.
    """

    parameters: Mapping[str, nn.Parameter]
    comm: Communicator
    slices: Sequence[Slice]
    shard_clients: Sequence[ShardClient]
    optimizer: Optimizer
    overlap: bool


class ServerClient(BoundSynchronizer):
    """Base of bound parameter servers. Weights and optimizer state are on the servers; `synchronize` fetches them.

    A step ends with a request for the new weights. `wait_parameters` copies them into the parameters of each module
    that the next forward pass reaches. So the last weights arrive while forward computes with the first.
    """

    optimizer_on_server = True

    def __init__(self, servers: Servers) -> None:
        self.parameters, self.comm, self.optimizer = servers.parameters, servers.comm, servers.optimizer
        self.shard_clients = servers.shard_clients
        self.client_slices = [
            ClientSlice(i, s, servers.parameters, servers.shard_clients[s.shard]) for i, s in enumerate(servers.slices)
        ]
        self._overlap = self.lazy_parameters = servers.overlap
        self._pending: list[ClientSlice] = []
        self._listening = False
        self._places: dict[str, list[tuple[ClientSlice, int]]] = {name: [] for name in servers.parameters}
        for slice_ in self.client_slices:
            for i, piece in enumerate(slice_.plan.pieces):
                self._places[piece.span.name].append((slice_, i))
        self._upload()
        self.begin()

    def _upload(self) -> None:
        """Collective: worker 0 sends weights and optimizer state, which are equal on all workers, to the servers."""
        if self.comm.rank == 0:
            state = {name: self.optimizer.state.get(parameter, {}) for name, parameter in self.parameters.items()}
            for slice_ in self.client_slices:
                slice_.init(state).wait()
        self.barrier()

    def barrier(self) -> None:
        """Collective: returns when all workers have called it."""
        self.comm.gather(torch.zeros(1)).wait()

    def begin(self) -> None:
        self.control: list[float] = []
        self._closing = False
        for slice_ in self.client_slices:
            slice_.begin()

    def close(self, control: list[float], weight: float = 1.0) -> None:
        self.control, self._closing = control, True

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        for slice_, i in self._places.get(name, ()):  # none, if the optimizer does not train it
            assert slice_.pull_in_flight is None, f"{name} was not read before its gradient was computed"
            if slice_.pushed is not None:
                raise UnisonoError(
                    f"the gradient of {name} was computed again after it was sent: backward ran again before the step "
                    "was taken, or visits this parameter more than once (set overlap=False, or pass the number of "
                    "backward passes of a step to world.bind)"
                )
            slice_.add(i, dense, weight)
            if self._closing and self._overlap:
                slice_.missing.discard(i)
                if not slice_.missing:
                    self.on_filled(slice_)

    def fold(self) -> None:
        """Do nothing, because `offer` has already added the gradients."""

    def on_filled(self, slice_: ClientSlice) -> None:
        """Called when all gradients of a slice have been offered, while backward still runs."""

    def request_weights(self, version: int) -> None:
        """Request the newest weights, of at least `version`, in the order in which the forward pass needs them."""
        self.wait_parameters()
        for slice_ in self.client_slices:
            slice_.request_weights(version)
        self._pending, self._listening = list(self.client_slices), False

    def wait_parameters(self, names: Collection[str] | None = None) -> None:
        if self._pending:
            self._receive(names)

    @torch.no_grad()
    def _receive(self, names: Collection[str] | None) -> None:
        wanted = (
            self._pending if names is None else [slice_ for name in names for slice_, _ in self._places.get(name, ())]
        )
        for slice_ in sorted(wanted, key=lambda slice_: slice_.number):
            if slice_.pull_in_flight is not None:
                slice_.receive()
                self.on_arrived(slice_)
                self._pending.remove(slice_)
        if not self._pending:
            self.on_all_arrived()
        elif not self._listening:
            self._listening = True
            for each in self.shard_clients:
                each.listen()

    def on_arrived(self, slice_: ClientSlice) -> None:
        """Called when the new weights of a slice have arrived."""

    def on_all_arrived(self) -> None:
        """Called when the new weights of all slices have arrived."""

    def finish(self) -> None:
        """Wait until nothing of the steps so far is in flight."""
        self.wait_parameters()

    def synchronize(self) -> None:
        """Collective: fetch the exact weights and the optimizer's state from the servers."""
        self.finish()
        self.barrier()
        for call in [slice_.request_exact() for slice_ in self.client_slices]:
            call.wait()
        self.request_weights(0)
        self.wait_parameters()
        for slice_, call in [(slice_, slice_.request_state(state=True)) for slice_ in self.client_slices]:
            self._take_state(slice_, call)
        self.barrier()

    def averaged_weights(self) -> AbstractContextManager[None]:
        self.finish()
        return self._with_server_weights()

    @contextmanager
    def _with_server_weights(self) -> Iterator[None]:
        with torch.no_grad():
            self.barrier()
            own = [slice_.read() for slice_ in self.client_slices]
            for slice_, call in [(slice_, slice_.request_state(state=False)) for slice_ in self.client_slices]:
                slice_.write(call.wait().tensors[0].to(slice_.plan.device))
            self.barrier()
        try:
            yield
        finally:
            with torch.no_grad():
                for slice_, flat in zip(self.client_slices, own):
                    slice_.write(flat)

    def state_dict(self) -> dict[str, Tensor]:
        self.finish()
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Send the parameters and the optimizer's state, which are already loaded, to the servers."""
        self.finish()
        self._upload()

    def residual_state(self) -> dict[str, Tensor]:
        return {
            f"{slice_.number} of {len(self.client_slices)}/{key}": tensor
            for slice_ in self.client_slices
            for key, tensor in slice_.memory.state_dict().items()
        }

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        for slice_ in self.client_slices:
            slice_.memory.load_state_dict(
                under(f"{slice_.number} of {len(self.client_slices)}", residuals), slice_.plan.device
            )

    @torch.no_grad()
    def _take_state(self, slice_: ClientSlice, call: ShardCall) -> None:
        """Copy the server's optimizer state for a slice into the local optimizer, as if that had taken the steps."""
        answer = call.wait()
        for (i, key, like), flat in zip(answer.fields["places"], answer.tensors[1:]):
            piece = slice_.plan.pieces[i]
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
