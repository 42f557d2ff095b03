"""A server for workers that do not wait for each other, or only so far.

Work is leased out in the seeded order. A worker pushes the gradient of a share, and pulls weights for the next one:
of a version that is `staleness` behind the step that this share is of, or newer; the server answers once it has them.
Both are on their way while the forward pass of the next share begins: a weight is waited for where it is used, and the
answer to the push of a slice, to which the memory of its gradient belongs, before the next gradient goes there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.comm import Communicator
from unisono.sync.server.client import ServerClient
from unisono.sync.server.client_slice import ClientSlice
from unisono.sync.server.shard_client import ShardClient
from unisono.sync.server.slice_optimizer import numbers_of
from unisono.sync.server.slices import Slice
from unisono.sync.synchronizer import WorkItem
from unisono.sync.work_leasing import LeaseClient, StepGateClient


class StalenessBound:
    """Which weights a share may be computed on.

    Args:
        micro_batches: of a step of the loop.
        needed: micro-batches that make a step of the server.
        staleness: how many of the server's steps weights may be behind; infinity: any.
        start: the step of the loop before which they may not be behind its beginning.
    """

    def __init__(self, micro_batches: int, needed: int, staleness: float, start: int = 0) -> None:
        self._micro_batches, self._needed, self._staleness = micro_batches, needed, staleness
        self._start = start
        self.first = 0

    def tick(self, item: WorkItem) -> int:
        """The server's step that `item` is part of, from 0 at `first`."""
        step, micro_batches = item
        return ((step - self.first) * self._micro_batches + micro_batches.start) // self._needed

    def need(self, item: WorkItem) -> int:
        """The least version for `item`."""
        step, _ = item
        if step < self._start:
            return self.tick((step, range(1)))
        return 0 if math.isinf(self._staleness) else max(0, self.tick(item) - int(self._staleness))


class AsynchronousClient(ServerClient):
    """`ParameterServer` with staleness, or with backup workers, in its world.

    Args:
        dealing: where work comes from; None: each worker has its `own` part of all steps that it is in time for.
        own: what it computes of each step if nobody asks for shares.
        asks_first: whether weights are asked for before the push. They lack it then, and come without waiting until it
            is added up.

    Attributes:
        dropped: slices of gradients that came too late.
    """

    synchronous = False

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        comm: Communicator,
        slices: Sequence[Slice],
        shard_clients: Sequence[ShardClient],
        optimizer: Optimizer,
        overlap: bool,
        *,
        bound: StalenessBound,
        leases: LeaseClient | None,
        own: range,
        pulls_first: bool,
    ) -> None:
        super().__init__(parameters, comm, slices, shard_clients, optimizer, overlap)
        self._bound, self._own, self._fixed_items = bound, own, leases is None
        self._leases = leases or StepGateClient(self.comm, own, self._earliest)
        # In turn, which step is next is known only when the weights for it are here.
        self.lazy_parameters = overlap and not self._fixed_items
        self._pulls_first = pulls_first and self.lazy_parameters
        self._pushes = self._stretches = 0
        self.dropped = 0

    def _earliest(self) -> int:
        return self._bound.first + min(client_slice.version for client_slice in self.client_slices)

    @property
    def leased_until(self) -> int:
        return self._leases.leased_until

    def work_items(self, first: int, until: int, stop: Callable[[], bool]) -> Iterator[WorkItem]:
        if not self._stretches:
            self._bound.first = first
        self._stretches += 1
        # All that was dealt out before is pushed, so this waits for nobody who waits for us.
        self.request_weights(self._bound.need((first, range(1))))
        self.wait_parameters()
        yield from self._leases.work_items(first, until, stop)

    def close(self, control: list[float], weight: float = 1.0) -> None:
        super().close(control, weight)
        self._leases.prepare()

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        for client_slice, _ in self._places.get(name, ()):
            self._finish_push(client_slice)
        super().offer(name, gradient, weight)

    def _finish_push(self, client_slice: ClientSlice) -> None:
        """The sum of a slice may be written into again."""
        if client_slice.push_in_flight is not None:
            self.dropped += client_slice.push_in_flight.wait().kind == "dropped"
            client_slice.push_in_flight = None
            client_slice.commit()

    def finish(self) -> None:
        super().finish()
        for client_slice in self.client_slices:
            self._finish_push(client_slice)

    def settle(self) -> PushedGradient:
        self.finish()
        for client_slice in self.client_slices:
            client_slice.seal()
        return PushedGradient(self)

    def square(self) -> float:
        """The squared 2-norm of this worker's own gradient."""
        values = [client_slice.value() for client_slice in self.client_slices if any(client_slice.seen)]
        return math.fsum(float(torch.linalg.vector_norm(v, dtype=torch.float64)) ** 2 for v in values)

    def exchange(self, scale: float) -> None:
        """Push what was computed, ask for what the next share needs."""
        item = self._leases.finished() if self._stretches else (self._pushes, self._own)
        self._pushes += 1
        groups, tick = numbers_of(self.optimizer), self._bound.tick(item)
        version = self._needed_after(tick)
        if version is not None and self._pulls_first:
            self.request_weights(version)
        for client_slice in self.client_slices:
            client_slice.push_in_flight = client_slice.push(
                self._pushes, groups, tick=tick, count=len(item[1]), scale=scale
            )
            client_slice.applied = True
        if version is not None and not self._pulls_first:
            self.request_weights(version)
        if not self.lazy_parameters:
            self.finish()

    def _needed_after(self, tick: int) -> int | None:
        """The version to go on with, now that this worker's part of `tick` is done; None: there is nothing to do."""
        if self._fixed_items:
            return tick + 1
        upcoming = self._leases.upcoming() if self._stretches else (self._pushes, self._own)
        return None if upcoming is None else self._bound.need(upcoming)


class PushedGradient:
    """What a step of one worker is about to do; see `PendingUpdate`."""

    agreed = False

    def __init__(self, server: AsynchronousClient) -> None:
        self._server, self.control = server, server.control

    def norm(self, without: Collection[str] = ()) -> float:
        """See `PendingUpdate.norm`; the servers know of no exceptions."""
        assert not without
        return math.sqrt(self._server.square())

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Push it, and ask for weights; the step is taken where the optimizer is, `step` is not called."""
        self._server.exchange(scale)
        return None
