"""The client of synchronous servers: every step uses the gradients of all workers.

offer: push of each slice as backward completes it ──► summed in the order of ranks
settle: control word ──► server 0: answered with the sum over all workers
norm, if needed ──► of the sums
apply: take(scale, learning rate) ──► one step; pull of all slices in the order of the forward pass
wait_parameters: waits for weights that have not arrived yet
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from unisono.sync.server.client import ServerClient
from unisono.sync.server.client_slice import ClientSlice
from unisono.sync.server.shard_client import ShardCall
from unisono.sync.server.slice_optimizer import numbers_of


class SynchronousClient(ServerClient):
    """The bound `ParameterServer` without staleness and without backup workers."""

    synchronous = True
    _round = 0
    _version = 0
    _taking: Sequence[ShardCall] = ()

    def begin(self) -> None:
        if self._round == 0 or any(slice_.pushed for slice_ in self.client_slices):
            self._round += 1
        super().begin()

    def on_filled(self, slice_: ClientSlice) -> None:
        slice_.pushed = slice_.push(self._round)

    def settle(self) -> MeanAtServers:
        self.wait_parameters()
        for slice_ in self.client_slices:
            if slice_.pushed is None:
                slice_.seal()
                self.on_filled(slice_)
        words = torch.tensor(self.control, dtype=torch.float64)
        summed = self.shard_clients[0].call("hear", {"round": self._round}, [words])
        for slice_ in self.client_slices:
            assert slice_.pushed is not None
            slice_.pushed.wait()
        control: list[float] = summed.wait().tensors[0].tolist()
        return MeanAtServers(self, control)

    def squares(self) -> list[tuple[str, float]]:
        """The parameter's name and the squared 2-norm of each piece of the mean gradient."""
        calls = [each.call("norm", {"round": self._round}) for each in self.shard_clients]
        squares: dict[str, list[float]] = {}
        for call in calls:
            squares |= call.wait().fields
        return [
            (span.name, square)
            for slice_ in self.client_slices
            for span, square in zip(slice_.plan.spans, squares[str(slice_.number)], strict=True)
        ]

    def take(self, scale: float) -> None:
        """Let all servers take the step of ``scale * mean gradient``, and request the new weights."""
        fields = {"round": self._round, "scale": scale, "groups": numbers_of(self.optimizer)}
        self._taking = [each.call("take", fields) for each in self.shard_clients]
        for slice_ in self.client_slices:
            slice_.applied = True
        self._version += 1
        self.request_weights(self._version)
        if not self.lazy_parameters:
            self.wait_parameters()

    def on_arrived(self, slice_: ClientSlice) -> None:
        """Commit the residual: new weights prove that the step was taken."""
        slice_.commit()

    def on_all_arrived(self) -> None:
        taking, self._taking = self._taking, ()
        for each in taking:
            each.wait()

    def averaged_weights(self) -> AbstractContextManager[None]:
        self.finish()
        return nullcontext()


class MeanAtServers:
    """The mean gradient of all workers, on the servers; a `PendingUpdate`."""

    agreed = True

    def __init__(self, server: SynchronousClient, control: list[float]) -> None:
        self._server, self.control = server, control
        self._squares: list[tuple[str, float]] | None = None

    def norm(self, without: Collection[str] = ()) -> float:
        if self._squares is None:
            self._squares = self._server.squares()
        return math.sqrt(math.fsum(square for name, square in self._squares if name not in without))

    def write(self, scale: float = 1.0) -> None:
        raise AssertionError("the mean gradient is on the servers")

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Let the servers take the step, and request the weights; `step` is not called."""
        self._server.take(scale)
        return None
