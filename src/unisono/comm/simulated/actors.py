"""Actors on the made-up clock: what they are sent arrives when the links have carried it; they take no time.

An actor of `host` shares the link of its worker. One of `serve` has a virtual host with a link of its own. Both
have random numbers of their own, so that what they draw does not depend on whose turn it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from unisono.comm.actor import Actor, ActorConnection, ActorMessage
from unisono.comm.actors import wire_format as frames
from unisono.comm.actors.server import largest_bytes_of
from unisono.comm.simulated.host import SimulatedHost, carry
from unisono.comm.simulated.virtual_clock import VirtualScheduler
from unisono.comm.simulated.virtual_work import Clock, VirtualWork
from unisono.errors import PeerLost

LOG = logging.getLogger("unisono")


class SimulatedContext(Clock, Protocol):
    """What services need of the simulated world."""

    scheduler: VirtualScheduler
    hosts: list[SimulatedHost]
    bytes_sent: list[int]

    def enter(self, work: VirtualWork) -> None:
        """Worker ``work.rank`` starts `work` now."""

    def is_lost(self, rank: int) -> bool:
        """Whether even what worker `rank` has sent is lost."""


class SimulatedService:
    """The actors that one `host` or `serve` has made; actor *i* stands and falls with worker ``i % size``."""

    def __init__(self, world: SimulatedContext, count: int, size: int, name: str, served: bool) -> None:
        self.world, self.size, self.name, self.served = world, size, name, served
        self.actors: list[VirtualActor | None] = [None] * count

    def add(self, number: int, make: Callable[[], Actor], station: SimulatedHost) -> None:
        """Actor `number` is there; the last one makes all of them meet."""
        self.actors[number] = VirtualActor(self, number, make, station)
        if all(self.actors):
            for each in self.present():
                each.connected(self.lines(-1 - each.number, each.station))

    def present(self) -> list[VirtualActor]:
        """All actors so far."""
        return [actor for actor in self.actors if actor]

    def lines(self, sender: int, station: SimulatedHost) -> list[ActorConnection]:
        """Lines of `sender`, who is at `station`, to all actors."""
        return [VirtualConnection(actor, sender, station) for actor in self.present()]

    def worker_gone(self, rank: int, detail: str) -> None:
        """Worker `rank` says nothing more, and takes along the actors that it hosts or has started."""
        for actor in self.present():
            if actor.number % self.size == rank:
                actor.end(f"worker {rank} is gone: {detail}")
        for actor in self.present():
            actor.sender_gone(rank, self.world.hosts[rank])


class VirtualActor:
    """An actor at its virtual host."""

    def __init__(
        self, service: SimulatedService, number: int, make: Callable[[], Actor], station: SimulatedHost
    ) -> None:
        self.service, self.number, self.station, self.world = service, number, station, service.world
        self.name = f"{service.name} {number}"
        self.rank = number % service.size
        self.ended = ""
        self._random = self.world.scheduler.own_random(self.name)
        with self.world.scheduler.drawing_from(self._random):
            self._actor = make()
        self.largest_bytes = largest_bytes_of(self._actor)
        self._broken: dict[int, str] = {}
        self._calls: list[VirtualCall] = []
        self._heard: dict[int, VirtualCall] = {}
        self.read: dict[int, ActorMessage] = {}  # by sender: the answer that it has waited for last

    def connected(self, lines: Sequence[ActorConnection]) -> None:
        """As `Actor.connected`."""
        self.run(lambda actor: actor.connected(lines))

    def run(self, step: Callable[[Actor], None]) -> None:
        """``step(actor)``, with the actor's own random numbers."""
        with self.world.scheduler.drawing_from(self._random):
            step(self._actor)

    def broken(self, sender: int) -> str:
        """Why `sender` gets no answer any more; empty: it does."""
        return self.ended or self._broken.get(sender, "")

    def send(self, call: VirtualCall) -> None:
        """What is ready to leave now arrives later."""
        self._calls = [each for each in self._calls if not each.is_over]
        self._calls.append(call)
        arrives = carry(call.station, self.station, call.nbytes, self.world.scheduler.now)
        self.world.scheduler.at(arrives, lambda: self._receive(call))

    def end(self, detail: str) -> None:
        """The actor is gone: who waits for it, or comes later, sees so."""
        if self.ended:
            return
        self.ended = f"{self.name}: {detail}"
        for call in self._calls:
            call.fail(self.ended)
        for other in self.service.present():
            if other is not self:
                other.sender_gone(-1 - self.number, self.station)

    def sender_gone(self, sender: int, station: SimulatedHost) -> None:
        """After what is on its way has arrived, the actor loses `sender`."""
        arrives = carry(station, self.station, 0, self.world.scheduler.now)
        self.world.scheduler.at(arrives, lambda: self._break(sender, "the sender is gone"))

    def _receive(self, call: VirtualCall) -> None:
        if self.broken(call.sender) or call.lost_on_its_way:
            call.fail(self.broken(call.sender) or "its sender is gone")
            return
        if call.payload_bytes > self.largest_bytes:
            self._break(call.sender, f"{self.name} takes at most {self.largest_bytes} bytes, not {call.payload_bytes}")
            return
        heard = self._heard.get(call.sender)
        if heard is not None and heard.is_over:
            _spoil(heard.message)
        self._heard[call.sender] = call
        try:
            self.run(lambda actor: actor.receive(call.sender, call.message, call.answer))
        except Exception as error:
            LOG.exception("%s failed at a %r", self.name, call.message.kind)
            self._break(call.sender, f"{self.name} failed with {type(error).__name__}: {error}")

    def _break(self, sender: int, detail: str) -> None:
        if self.broken(sender):
            return
        self._broken[sender] = detail
        for call in self._calls:
            if call.sender == sender:
                call.fail(detail)
        try:
            self.run(lambda actor: actor.lost(sender))
        except Exception:
            LOG.exception("%s failed when it lost %d", self.name, sender)


class VirtualCall(VirtualWork):
    """A message under way to an actor, or its answer back; the `Work` of a worker that has called."""

    def __init__(
        self,
        to: VirtualActor,
        sender: int,
        station: SimulatedHost,
        message: ActorMessage,
        then: Callable[[ActorMessage | None], None] | None,
    ) -> None:
        super().__init__(to.world, sender)
        self.to, self.sender, self.station, self.then = to, sender, station, then
        self.nbytes = frames.nbytes(frames.encode(message))
        self.message = _copy(message)
        self.payload_bytes = sum(x.nbytes for x in self.message.tensors)
        self.verb = message.kind
        self._world = to.world
        self._answer: ActorMessage | None = None
        self._waited_for = False

    @property
    def named(self) -> str:
        return f"{self.verb!r} to {self.to.name}"

    @property
    def is_over(self) -> bool:
        """Answered, or never will be."""
        return self._answer is not None or self.settled

    @property
    def lost_on_its_way(self) -> bool:
        """Its sender was lost before it arrived."""
        return self.sender >= 0 and self._world.is_lost(self.sender)

    def overdue(self, timeout_seconds: float) -> PeerLost:
        return PeerLost([self.to.rank], self.verb, f"{self.to.name} was silent for {timeout_seconds:g} s")

    def wait(self) -> ActorMessage:
        """As the contract; moves the clock to when the answer is there."""
        self.until_over()
        assert self._answer is not None
        if not self._waited_for:
            self._waited_for = True
            if self.sender in self.to.read:
                _spoil(self.to.read[self.sender])
            self.to.read[self.sender] = self._answer
        return self._answer

    def answer(self, message: ActorMessage) -> None:
        """What the actor is given to answer with."""
        if self._answer is not None:
            raise RuntimeError(f"{self.to.name} answered a {self.verb!r} twice")
        if self.is_over:
            return
        self._answer = _copy(message)
        nbytes = frames.nbytes(frames.encode(message))
        arrives = carry(self.to.station, self.station, nbytes, self._world.scheduler.now)
        count(self._world, self.to.station, self.station, nbytes)
        self._settle(arrives)

    def fail(self, detail: str) -> None:
        """There will be no answer."""
        if not self.is_over:
            self.error = PeerLost([self.to.rank], self.verb, detail)
            latency = max(self.to.station.link.latency_seconds, self.station.link.latency_seconds)
            self._settle(self._world.scheduler.now + (0 if self.to.station is self.station else latency))

    def _settle(self, time: float) -> None:
        self.finish = time
        if self.then is None:
            self._world.scheduler.wake(self.rank, time)
        else:
            self._world.scheduler.at(time, self._call_back)

    def _call_back(self) -> None:
        own = self.to.service.actors[-1 - self.sender]
        assert own is not None
        assert self.then is not None
        then = self.then
        if not own.ended:
            try:
                own.run(lambda actor: then(self._answer))
            except Exception:
                LOG.exception("%s failed at an answer of %s", own.name, self.to.name)


class VirtualConnection:
    """The `ActorConnection` of `sender`, who is at `station`."""

    pid = None

    def __init__(self, to: VirtualActor, sender: int, station: SimulatedHost) -> None:
        self._to, self._sender, self._station = to, sender, station
        self._closed = False

    def call(self, message: ActorMessage) -> VirtualCall:
        call = VirtualCall(self._to, self._sender, self._station, message, None)
        self._to.world.enter(call)
        self._send(call)
        return call

    def send(self, message: ActorMessage, then: Callable[[ActorMessage | None], None]) -> None:
        self._send(VirtualCall(self._to, self._sender, self._station, message, then))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._to.sender_gone(self._sender, self._station)

    def _send(self, call: VirtualCall) -> None:
        broken = self._to.broken(self._sender)
        if self._closed or broken:
            call.fail(broken or "this end was closed")
            return
        count(self._to.world, self._station, self._to.station, call.nbytes)
        self._to.send(call)


def count(world: SimulatedContext, sender: SimulatedHost, receiver: SimulatedHost, nbytes: int) -> None:
    """What has left a worker, be it said by itself or by the actor that it hosts."""
    if sender is not receiver and sender.rank >= 0:
        world.bytes_sent[sender.rank] += nbytes


def _copy(message: ActorMessage) -> ActorMessage:
    """As after a journey: flat, in other memory, and fields as JSON has them."""
    tensors = [x.detach().reshape(-1).clone() for x in message.tensors]
    return ActorMessage(*frames.parse_text(frames.text_of(message)), tensors)


def _spoil(message: ActorMessage) -> None:
    """Noise where a transport would use its memory again, so that nobody relies on what is not promised."""
    for x in message.tensors:
        x.fill_(math.nan if x.is_floating_point() else x.dtype == torch.bool or torch.iinfo(x.dtype).max)
