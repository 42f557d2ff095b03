"""Actors on the virtual clock: messages arrive after the time that the links take; actors themselves take no time.

An actor of `Services.host` shares the link of its worker. An actor of `Services.serve` has a virtual host with a link
of its own. Each actor has random generators of its own, so that its random numbers do not depend on which worker runs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from unisono.comm.actor import Actor, ActorConnection, ActorMessage
from unisono.comm.actors import wire_format
from unisono.comm.actors.server import largest_bytes_of
from unisono.comm.simulated.host import SimulatedHost, carry
from unisono.comm.simulated.virtual_clock import VirtualScheduler
from unisono.comm.simulated.virtual_work import Clock, VirtualWork
from unisono.errors import PeerLost

LOG = logging.getLogger("unisono")


class SimulatedContext(Clock, Protocol):
    """The part of `SimulatedWorld` that actors and their connections need."""

    scheduler: VirtualScheduler
    hosts: list[SimulatedHost]
    bytes_sent: list[int]

    def enter(self, work: VirtualWork) -> None:
        """Register that worker ``work.rank`` starts `work` now."""

    def is_lost(self, rank: int) -> bool:
        """Whether worker `rank` is lost, and with it the messages that it has sent."""


class SimulatedService:
    """The actors of one call of `Services.host` or `Services.serve`; actor *i* ends with worker ``i % size``."""

    def __init__(self, world: SimulatedContext, count: int, size: int, name: str, served: bool) -> None:
        self.world, self.size, self.name, self.served = world, size, name, served
        self.actors: list[VirtualActor | None] = [None] * count

    def add(self, number: int, make: Callable[[], Actor], host: SimulatedHost) -> None:
        """Add actor `number`. When the last actor is added, all are connected with each other."""
        self.actors[number] = VirtualActor(self, number, make, host)
        if all(self.actors):
            for each in self.added():
                each.connected(self.connections(-1 - each.number, each.host))

    def added(self) -> list[VirtualActor]:
        """The actors added so far."""
        return [actor for actor in self.actors if actor]

    def connections(self, sender: int, host: SimulatedHost) -> list[ActorConnection]:
        """Connections of `sender`, which runs on `host`, to all actors."""
        return [VirtualConnection(actor, sender, host) for actor in self.added()]

    def worker_ended(self, rank: int, detail: str) -> None:
        """Worker `rank` sends nothing more, and ends with the actors that it hosts or has started."""
        for actor in self.added():
            if actor.number % self.size == rank:
                actor.end(f"worker {rank} has ended: {detail}")
        for actor in self.added():
            actor.sender_lost(rank, self.world.hosts[rank])


class VirtualActor:
    """An actor on its virtual host."""

    def __init__(self, service: SimulatedService, number: int, make: Callable[[], Actor], host: SimulatedHost) -> None:
        self.service, self.number, self.host, self.world = service, number, host, service.world
        self.name = f"{service.name} {number}"
        self.rank = number % service.size
        self.ended = ""
        self._random = self.world.scheduler.own_random(self.name)
        with self.world.scheduler.drawing_from(self._random):
            self._actor = make()
        self.largest_bytes = largest_bytes_of(self._actor)
        self._disconnected: dict[int, str] = {}
        self._calls: list[VirtualCall] = []
        self._last_call: dict[int, VirtualCall] = {}
        self.last_answers: dict[int, ActorMessage] = {}  # by sender: the answer that it waited for last

    def connected(self, connections: Sequence[ActorConnection]) -> None:
        """See `Actor.connected`."""
        self.run(lambda actor: actor.connected(connections))

    def run(self, step: Callable[[Actor], None]) -> None:
        """Call ``step(actor)`` with the actor's own random generators."""
        with self.world.scheduler.drawing_from(self._random):
            step(self._actor)

    def failure_of(self, sender: int) -> str:
        """Why `sender` gets no answers any more; empty if it still gets them."""
        return self.ended or self._disconnected.get(sender, "")

    def send(self, call: VirtualCall) -> None:
        """Send the message of `call`, which arrives later."""
        self._calls = [each for each in self._calls if not each.is_finished]
        self._calls.append(call)
        arrives = carry(call.host, self.host, call.nbytes, self.world.scheduler.now)
        self.world.scheduler.at(arrives, lambda: self._receive(call))

    def end(self, detail: str) -> None:
        """End the actor: all its calls, now and later, fail."""
        if self.ended:
            return
        self.ended = f"{self.name}: {detail}"
        for call in self._calls:
            call.fail(self.ended)
        for other in self.service.added():
            if other is not self:
                other.sender_lost(-1 - self.number, self.host)

    def sender_lost(self, sender: int, host: SimulatedHost) -> None:
        """Notify the actor that `sender` is lost, once messages in flight have arrived."""
        arrives = carry(host, self.host, 0, self.world.scheduler.now)
        self.world.scheduler.at(arrives, lambda: self._disconnect(sender, "the sender is lost"))

    def _receive(self, call: VirtualCall) -> None:
        if self.failure_of(call.sender) or call.sender_is_lost:
            call.fail(self.failure_of(call.sender) or "the sender is lost")
            return
        if call.payload_bytes > self.largest_bytes:
            self._disconnect(
                call.sender, f"{self.name} takes at most {self.largest_bytes} bytes, not {call.payload_bytes}"
            )
            return
        previous = self._last_call.get(call.sender)
        if previous is not None and previous.is_finished:
            _overwrite(previous.message)
        self._last_call[call.sender] = call
        try:
            self.run(lambda actor: actor.receive(call.sender, call.message, call.answer))
        except Exception as error:
            LOG.exception("%s failed at a message %r", self.name, call.message.kind)
            self._disconnect(call.sender, f"{self.name} failed with {type(error).__name__}: {error}")

    def _disconnect(self, sender: int, detail: str) -> None:
        if self.failure_of(sender):
            return
        self._disconnected[sender] = detail
        for call in self._calls:
            if call.sender == sender:
                call.fail(detail)
        try:
            self.run(lambda actor: actor.lost(sender))
        except Exception:
            LOG.exception("%s failed when it lost %d", self.name, sender)


class VirtualCall(VirtualWork):
    """A message to an actor and its answer, in flight; for a call of a worker, also its `Work`."""

    def __init__(
        self,
        actor: VirtualActor,
        sender: int,
        host: SimulatedHost,
        message: ActorMessage,
        then: Callable[[ActorMessage | None], None] | None,
    ) -> None:
        super().__init__(actor.world, sender)
        self.actor, self.sender, self.host, self.then = actor, sender, host, then
        self.nbytes = wire_format.nbytes(wire_format.encode(message))
        self.message = _copy(message)
        self.payload_bytes = sum(x.nbytes for x in self.message.tensors)
        self.verb = message.kind
        self._world = actor.world
        self._answer: ActorMessage | None = None
        self._waited_for = False

    @property
    def description(self) -> str:
        return f"{self.verb!r} to {self.actor.name}"

    @property
    def is_finished(self) -> bool:
        """Whether the call is answered, or has failed."""
        return self._answer is not None or self.settled

    @property
    def sender_is_lost(self) -> bool:
        """Whether the sender is a worker that is lost."""
        return self.sender >= 0 and self._world.is_lost(self.sender)

    def overdue(self, timeout_seconds: float) -> PeerLost:
        return PeerLost(
            [self.actor.rank], self.verb, f"{self.actor.name}: no answer within the deadline of {timeout_seconds:g} s"
        )

    def wait(self) -> ActorMessage:
        """See `Work.wait`. Moves the clock to the arrival of the answer."""
        self.wait_until_finished()
        assert self._answer is not None
        if not self._waited_for:
            self._waited_for = True
            if self.sender in self.actor.last_answers:
                _overwrite(self.actor.last_answers[self.sender])
            self.actor.last_answers[self.sender] = self._answer
        return self._answer

    def answer(self, message: ActorMessage) -> None:
        """Send `message` as the answer."""
        if self._answer is not None:
            raise RuntimeError(f"{self.actor.name} answered a message {self.verb!r} twice")
        if self.is_finished:
            return
        self._answer = _copy(message)
        nbytes = wire_format.nbytes(wire_format.encode(message))
        arrives = carry(self.actor.host, self.host, nbytes, self._world.scheduler.now)
        count(self._world, self.actor.host, self.host, nbytes)
        self._settle(arrives)

    def fail(self, detail: str) -> None:
        """Fail the call."""
        if not self.is_finished:
            self.error = PeerLost([self.actor.rank], self.verb, detail)
            latency = max(self.actor.host.link.latency_seconds, self.host.link.latency_seconds)
            self._settle(self._world.scheduler.now + (0 if self.actor.host is self.host else latency))

    def _settle(self, time: float) -> None:
        self.finish = time
        if self.then is None:
            self._world.scheduler.wake(self.rank, time)
        else:
            self._world.scheduler.at(time, self._call_back)

    def _call_back(self) -> None:
        own = self.actor.service.actors[-1 - self.sender]
        assert own is not None
        assert self.then is not None
        then = self.then
        if not own.ended:
            try:
                own.run(lambda actor: then(self._answer))
            except Exception:
                LOG.exception("%s failed while it handled an answer of %s", own.name, self.actor.name)


class VirtualConnection:
    """The `ActorConnection` of `sender`, which runs on `host`."""

    pid = None

    def __init__(self, actor: VirtualActor, sender: int, host: SimulatedHost) -> None:
        self._actor, self._sender, self._host = actor, sender, host
        self._closed = False

    def call(self, message: ActorMessage) -> VirtualCall:
        call = VirtualCall(self._actor, self._sender, self._host, message, None)
        self._actor.world.enter(call)
        self._send(call)
        return call

    def send(self, message: ActorMessage, then: Callable[[ActorMessage | None], None]) -> None:
        self._send(VirtualCall(self._actor, self._sender, self._host, message, then))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._actor.sender_lost(self._sender, self._host)

    def _send(self, call: VirtualCall) -> None:
        failure_of = self._actor.failure_of(self._sender)
        if self._closed or failure_of:
            call.fail(failure_of or "this end was closed")
            return
        count(self._actor.world, self._host, self._actor.host, call.nbytes)
        self._actor.send(call)


def count(world: SimulatedContext, sender: SimulatedHost, receiver: SimulatedHost, nbytes: int) -> None:
    """Count bytes that a worker sends, by itself or by the actor that it hosts."""
    if sender is not receiver and sender.rank >= 0:
        world.bytes_sent[sender.rank] += nbytes


def _copy(message: ActorMessage) -> ActorMessage:
    """`message` as a transport delivers it: tensors flat and in other memory, fields as JSON represents them."""
    tensors = [x.detach().reshape(-1).clone() for x in message.tensors]
    return ActorMessage(*wire_format.parse_text(wire_format.text_of(message)), tensors)


def _overwrite(message: ActorMessage) -> None:
    """Overwrite memory that a transport would reuse, so that no caller relies on its content."""
    for x in message.tensors:
        x.fill_(
            math.nan if x.is_floating_point() or x.is_complex() else x.dtype == torch.bool or torch.iinfo(x.dtype).max
        )
