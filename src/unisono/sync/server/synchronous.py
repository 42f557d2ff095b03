"""A synchronous server: every step is all workers' together.

push of each slice as backward fills it ──► sums in the order of ranks
settle: control word ──► server 0: answered when all have come
norm, if it is asked for ──► of the sums
apply: take(scale, learning rate) ──► one step; pull, first what the forward pass needs first
forward: need ──► waits for what has not arrived yet
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
    """`ParameterServer` without staleness in its world."""

    synchronous = True
    _round = 0
    _version = 0
    _taking: Sequence[ShardCall] = ()

    def begin(self) -> None:
        if self._round == 0 or any(client_slice.pushed for client_slice in self.client_slices):
            self._round += 1
        super().begin()

    def on_filled(self, client_slice: ClientSlice) -> None:
        client_slice.pushed = client_slice.push(self._round)

    def settle(self) -> MeanAtServers:
        self.wait_parameters()
        for client_slice in self.client_slices:
            if client_slice.pushed is None:
                client_slice.seal()
                self.on_filled(client_slice)
        words = torch.tensor(self.control, dtype=torch.float64)
        heard = self.shard_clients[0].call("hear", {"round": self._round}, [words])
        for client_slice in self.client_slices:
            assert client_slice.pushed is not None
            client_slice.pushed.wait()
        control: list[float] = heard.wait().tensors[0].tolist()
        return MeanAtServers(self, control)

    def squares(self) -> list[tuple[str, float]]:
        """The squared 2-norms of the mean gradient's pieces, and whose pieces they are."""
        asked = [each.call("norm", {"round": self._round}) for each in self.shard_clients]
        squares: dict[str, list[float]] = {}
        for each in asked:
            squares |= each.wait().fields
        return [
            (span.name, square)
            for client_slice in self.client_slices
            for span, square in zip(client_slice.plan.spans, squares[str(client_slice.number)], strict=True)
        ]

    def take(self, scale: float) -> None:
        """All servers take the step; the new weights are asked for."""
        fields = {"round": self._round, "scale": scale, "groups": numbers_of(self.optimizer)}
        self._taking = [each.call("take", fields) for each in self.shard_clients]
        for client_slice in self.client_slices:
            client_slice.applied = True
        self._version += 1
        self.request_weights(self._version)
        if not self.lazy_parameters:
            self.wait_parameters()

    def on_arrived(self, client_slice: ClientSlice) -> None:
        """These weights are only there if the step was taken."""
        client_slice.commit()

    def on_all_arrived(self) -> None:
        taking, self._taking = self._taking, ()
        for each in taking:
            each.wait()

    def averaged_weights(self) -> AbstractContextManager[None]:
        self.finish()
        return nullcontext()


class MeanAtServers:
    """What a step of all workers is about to do; see `PendingUpdate`."""

    agreed = True

    def __init__(self, server: SynchronousClient, control: list[float]) -> None:
        self._server, self.control = server, control
        self._squares: list[tuple[str, float]] | None = None

    def norm(self, without: Collection[str] = ()) -> float:
        """See `PendingUpdate.norm`."""
        if self._squares is None:
            self._squares = self._server.squares()
        return math.sqrt(math.fsum(square for name, square in self._squares if name not in without))

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Have the step taken where the optimizer is, and ask for the weights; `step` is not called."""
        self._server.take(scale)
        return None
