"""The client of asynchronous servers: bounded staleness, fully asynchronous, or with backup workers.

Work items are leased in the seeded order. A worker pushes the gradient of an item, and pulls weights for the next item.
These may be at most `staleness` versions older than that item's step; the server answers once it has such weights. Push
and pull are in flight while the forward pass of the next item begins. A module waits for its weights before it uses
them. The memory of a slice's gradient is used again only after the push of that gradient is answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from unisono.sync.server.client import ServerClient, Servers
from unisono.sync.server.client_slice import ClientSlice
from unisono.sync.server.slice_optimizer import numbers_of
from unisono.sync.synchronizer import WorkItem
from unisono.sync.work_leasing import LeaseClient, StepGateClient


class StalenessBound:
    """Determines the oldest version of the weights on which a work item may be computed.

    Args:
        micro_batches: the number of micro-batches of a step of the loop.
        needed: the number of micro-batches of a step of the server.
        staleness: by how many of the server's steps weights may be older than a work item; infinity: any number.
        start: for each step of the loop before this one, weights have to include all previous steps of the loop.

    Attributes:
        first: the step of the loop at which the server's steps began.
    """

    def __init__(self, micro_batches: int, needed: int, staleness: float, start: int = 0) -> None:
        self._micro_batches, self._needed, self._staleness = micro_batches, needed, staleness
        self._start = start
        self.first = 0

    def tick(self, item: WorkItem) -> int:
        """The server's step that `item` belongs to, counted from 0 at `first`."""
        step, micro_batches = item
        return ((step - self.first) * self._micro_batches + micro_batches.start) // self._needed

    def need(self, item: WorkItem) -> int:
        """The minimum version of the weights for `item`."""
        step, _ = item
        if step < self._start:
            return self.tick((step, range(1)))
        return 0 if math.isinf(self._staleness) else max(0, self.tick(item) - int(self._staleness))


class AsynchronousClient(ServerClient):
    """The bound `ParameterServer` with staleness, or with backup workers.

    Args:
        leases: the client of the lease server; None: this worker computes its `own` part of all steps for which it is
            in time.
        own: the micro-batches of each step that this worker computes without leases.
        pulls_first: whether new weights are requested before the gradient is pushed. The weights then lack this
            gradient, but the answer does not wait until the server has added it.

    Attributes:
        dropped: how many slices of this worker's gradients were too late for their step.
    """

    synchronous = False

    def __init__(
        self, servers: Servers, *, bound: StalenessBound, leases: LeaseClient | None, own: range, pulls_first: bool
    ) -> None:
        super().__init__(servers)
        self._bound, self._own, self._fixed_items = bound, own, leases is None
        self._leases = leases or StepGateClient(self.comm, own, self._earliest)
        # With a fixed part, the next step is known only when the weights for it have arrived.
        self.lazy_parameters = servers.overlap and not self._fixed_items
        self._pulls_first = pulls_first and self.lazy_parameters
        self._pushes = self._ranges = 0
        self.dropped = 0

    def _earliest(self) -> int:
        return self._bound.first + min(slice_.version for slice_ in self.client_slices)

    @property
    def leased_until(self) -> int:
        return self._leases.leased_until

    def work_items(self, first: int, until: int, stop: Callable[[], bool]) -> Iterator[WorkItem]:
        if not self._ranges:
            self._bound.first = first
        self._ranges += 1
        # All items that were leased before are pushed, so this wait cannot be part of a deadlock.
        self.request_weights(self._bound.need((first, range(1))))
        self.wait_parameters()
        yield from self._leases.work_items(first, until, stop)

    def close(self, control: list[float], weight: float = 1.0) -> None:
        super().close(control, weight)
        self._leases.prepare()

    def offer(self, name: str, gradient: Tensor, weight: float) -> None:
        for slice_, _ in self._places.get(name, ()):
            self._finish_push(slice_)
        super().offer(name, gradient, weight)

    def _finish_push(self, slice_: ClientSlice) -> None:
        """Wait for the answer to the push in flight, after which the sum of the slice may be overwritten."""
        if slice_.push_in_flight is not None:
            self.dropped += slice_.push_in_flight.wait().kind == "dropped"
            slice_.push_in_flight = None
            slice_.commit()

    def finish(self) -> None:
        super().finish()
        for slice_ in self.client_slices:
            self._finish_push(slice_)

    def settle(self) -> PushedGradient:
        self.finish()
        for slice_ in self.client_slices:
            slice_.seal()
        return PushedGradient(self)

    def square(self) -> float:
        """The squared 2-norm of this worker's own gradient."""
        values = [slice_.value() for slice_ in self.client_slices if any(slice_.seen)]
        return math.fsum(float(torch.linalg.vector_norm(v, dtype=torch.float64)) ** 2 for v in values)

    def exchange(self, scale: float) -> None:
        """Push the gradients of the current work item, and request weights for the next one."""
        item = self._leases.finished() if self._ranges else (self._pushes, self._own)
        self._pushes += 1
        groups, tick = numbers_of(self.optimizer), self._bound.tick(item)
        version = self._needed_after(tick)
        if version is not None and self._pulls_first:
            self.request_weights(version)
        for slice_ in self.client_slices:
            slice_.push_in_flight = slice_.push(self._pushes, groups, tick=tick, count=len(item[1]), scale=scale)
            slice_.applied = True
        if version is not None and not self._pulls_first:
            self.request_weights(version)
        if not self.lazy_parameters:
            self.finish()

    def _needed_after(self, tick: int) -> int | None:
        """The least version of the weights for the next work item, where `tick` is the server step of the present one.

        None: there is no next item.
        """
        if self._fixed_items:
            return tick + 1
        upcoming = self._leases.upcoming() if self._ranges else (self._pushes, self._own)
        return None if upcoming is None else self._bound.need(upcoming)


class PushedGradient:
    """The gradient of one worker's work item, before it is pushed; a `PendingUpdate`."""

    agreed = False

    def __init__(self, server: AsynchronousClient) -> None:
        self._server, self.control = server, server.control

    def norm(self, without: Collection[str] = ()) -> float:
        """The norm over all parameters; `without` has to be empty."""
        assert not without
        return math.sqrt(self._server.square())

    def write(self, scale: float = 1.0) -> None:
        raise AssertionError("the mean gradient is on the servers")

    def apply(self, step: Callable[[], Any], scale: float = 1.0) -> Any:
        """Push the gradient, and request weights. The servers take the step; `step` is not called."""
        self._server.exchange(scale)
        return None
