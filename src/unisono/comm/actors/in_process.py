"""Actors in the process and thread of their only caller: those of a worker without peers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from unisono.comm.actor import Actor, ActorConnection, ActorMessage
from unisono.errors import PeerLost

LOG = logging.getLogger("unisono")


class Backlog:
    """A queue of deliveries, by which no actor receives a message while it processes another."""

    def __init__(self) -> None:
        self._steps: deque[Callable[[], None]] = deque()
        self._busy = False

    def add(self, step: Callable[[], None]) -> None:
        """Run `step` after all steps added before it: at once, unless a step calls this."""
        self._steps.append(step)
        if self._busy:
            return
        self._busy = True
        try:
            while self._steps:
                self._steps.popleft()()
        finally:
            self._busy = False


class DirectCall:
    """The `Work` of a `DirectConnection`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.answer: ActorMessage | None = None
        self.failure = ""

    def poll(self) -> bool:
        return self.answer is not None or bool(self.failure)

    def wait(self) -> ActorMessage:
        """See `Work.wait`. An actor that has not answered by now never will, as nothing else runs."""
        if self.answer is None:
            raise PeerLost([0], self._kind, self.failure or "the actor has not answered, and receives nothing more")
        return self.answer


class DirectConnection:
    """The `ActorConnection` of `sender` to an actor in the same thread.

    Tensors are copied both ways, so that neither end can modify those of the other.
    """

    pid = None

    def __init__(self, actor: Actor, sender: int, backlog: Backlog) -> None:
        self._actor, self._sender, self._backlog = actor, sender, backlog
        self._ended = ""

    def call(self, message: ActorMessage) -> DirectCall:
        call = DirectCall(message.kind)
        self._deliver(message, call, lambda: None)
        return call

    def send(self, message: ActorMessage, then: Callable[[ActorMessage | None], None]) -> None:
        call = DirectCall(message.kind)
        self._deliver(message, call, lambda: self._backlog.add(lambda: then(call.answer)))

    def close(self) -> None:
        self._end("this end was closed")

    def _deliver(self, message: ActorMessage, call: DirectCall, on_done: Callable[[], None]) -> None:
        copied = _copy(message)

        def answer(reply: ActorMessage) -> None:
            if call.answer is not None:
                raise RuntimeError(f"a message {message.kind!r} was answered twice")
            call.answer = _copy(reply)
            on_done()

        def receive() -> None:
            if not self._ended:
                try:
                    self._actor.receive(self._sender, copied, answer)
                except Exception as error:
                    LOG.exception("an actor failed at a message %r", message.kind)
                    self._end(f"the actor failed with {type(error).__name__}: {error}")
            if self._ended and call.answer is None:
                call.failure = self._ended
                on_done()

        self._backlog.add(receive)

    def _end(self, reason: str) -> None:
        if not self._ended:
            self._ended = reason
            self._backlog.add(lambda: self._actor.lost(self._sender))


def connect_in_process(actors: Sequence[Actor]) -> list[ActorConnection]:
    """Connect `actors` with each other; returns connections of worker 0 to all of them."""
    backlog = Backlog()
    for number, actor in enumerate(actors):
        actor.connected([DirectConnection(other, -1 - number, backlog) for other in actors])
    return [DirectConnection(actor, 0, backlog) for actor in actors]


def _copy(message: ActorMessage) -> ActorMessage:
    return ActorMessage(message.kind, dict(message.fields), [x.detach().reshape(-1).clone() for x in message.tensors])
