"""Things that answer: the contract of what is not a collective.

A collective needs everybody at once. A parameter server, a dealer of micro-batches or a partner of asynchronous gossip
is instead an *actor*: it receives one message at a time and answers, at once or when something else has happened. The
same actor runs in a process of its own behind a socket, in a worker beside its training thread, and on the made-up
clock of the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from unisono.comm.work import Work


@dataclass(frozen=True)
class ActorMessage:
    """What travels to an actor and back.

    Args:
        kind: what is wanted, or what the answer is.
        fields: what JSON knows, small.
        tensors: flat, contiguous, on the CPU; they travel as they lie in memory.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()


Answer = Callable[[ActorMessage], None]


class Actor(Protocol):
    """Somebody who receives messages, one at a time, and never waits inside a method."""

    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """Take `message` of worker `sender` (or of actor ``-1 - i``), and call `answer` exactly once: now, or within
        a later `receive`, `lost` or callback of a `tell`.

        The tensors are the transport's memory, which the sender's next message overwrites: copy what is kept past the
        answer. Until then they are this call's alone: they may be written into, and be part of its answer. What is
        handed to `answer` may be read until the sender's next message arrives, so do not write into it before. An
        exception ends that sender's connection and nothing else.
        """

    def lost(self, sender: int) -> None:
        """`sender` will say nothing more; what it still waits for need not be answered."""

    def meet(self, lines: Sequence[ActorConnection]) -> None:
        """Called once, before anything is received: lines to all actors of the same `serve`, by number."""


class ActorConnection(Protocol):
    """A conversation with one actor, wherever it lives. Messages arrive in the order in which they were sent."""

    def call(self, message: ActorMessage) -> Work[ActorMessage]:
        """Send `message`; the work's result is the answer. Several calls may be under way; answers may come in any
        order. The tensors of `message` belong to the line until its answer is there; the answer's tensors are valid
        until the next `call` whose work has been waited for.

        Raises (in `wait`): `PeerLost` when the actor is gone, or silent past the deadline; its `ranks` are the worker
        that hosts or has started it, its text names the actor.
        """

    def tell(self, message: ActorMessage, then: Callable[[ActorMessage | None], None]) -> None:
        """For actors: send `message`, and have ``then(answer)`` called as if it were received; None: the other is
        gone. The tensors are copied."""

    def close(self) -> None:
        """End the conversation."""


class Services(Protocol):
    """What a communicator offers besides its verbs; all workers call these alike, in the same order.

    Both return when all actors have met. A payload may have 1 GiB, or what the actor's attribute `largest_bytes` says;
    who sends more loses the connection. Calls are counted in `bytes_sent` as they travel, with their headers, and so
    is what an actor says that a worker hosts; what a worker says to itself is not.
    """

    def host(self, actor: Actor) -> list[ActorConnection]:
        """Every worker has its own `actor` answer beside its training thread; lines to all of them, by rank."""

    def serve(self, count: int, service: str, config: Mapping[str, Any]) -> list[ActorConnection]:
        """Start `count` actors in processes of their own, number *i* by worker ``i % size``; lines to all of them.

        Args:
            service: ``module:function``, called as ``function(i, config)`` in the new process; returns the actor.
            config: what JSON knows; the same on all workers.

        The processes end with the communicator, and with the worker that started them, however it ends.
        """
