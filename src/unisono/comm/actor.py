"""The contract of actors: services that answer messages, for communication that is not collective.

A collective operation needs all ranks at once. A parameter server, a lease server or a partner of asynchronous gossip
is instead an *actor*. It receives one message at a time and answers, at once or after another event. The same actor
can run in a process of its own behind a socket, in a worker next to its training thread, and on the virtual clock of
the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from unisono.comm.work import Work


@dataclass(frozen=True)
class ActorMessage:
    """A message to an actor, or its answer.

    Args:
        kind: which request or answer it is, such as ``pull``.
        fields: small values that JSON can represent.
        tensors: flat, contiguous tensors on the CPU; their bytes are sent as they are in memory.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()


Answer = Callable[[ActorMessage], None]


class Actor(Protocol):
    """A service that receives one message at a time. Its methods never block."""

    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """Process `message` of worker `sender`; a negative `sender` is the number ``-1 - i`` of actor *i*.

        Call `answer` exactly once: now, or within a later `receive`, `lost` or callback of a `send`. The tensors of
        `message` are memory of the transport, which is reused once `message` is answered: copy what is kept longer.
        Until then the actor may write into these tensors, and use them in its answer. The transport may read the
        tensors of an answer until the sender's next message arrives: do not write into them before that. An exception
        of `receive` ends the connection of this sender only.
        """

    def lost(self, sender: int) -> None:
        """Take note that `sender` is lost. Its requests need not be answered."""

    def connected(self, peers: Sequence[ActorConnection]) -> None:
        """Called once, before the first message, with connections to all actors of the same service, by number.

        A service is what one call of `Services.host` or `Services.serve` starts. It includes this actor.
        """


class ActorConnection(Protocol):
    """A connection to one actor. Messages arrive in the order in which they were sent."""

    def call(self, message: ActorMessage) -> Work[ActorMessage]:
        """Send `message`; the result of the work is the answer.

        Several calls may be in flight, and answers may come in any order. The tensors of `message` belong to the
        connection until the answer has arrived. The tensors of an answer are valid until the caller waits for another
        call of this connection.

        Raises (in `wait`): `PeerLost` when the actor has ended, or has not answered by the deadline. The error's
        `ranks` have the worker that hosts or has started the actor, and its text names the actor.
        """

    def send(self, message: ActorMessage, then: Callable[[ActorMessage | None], None]) -> None:
        """For actors: send `message`, and call ``then(answer)`` when the answer arrives.

        ``then(None)`` is called instead if the other actor is lost. The tensors of `message` are copied. `then` is
        called like `receive`: never during another call of the actor that sends.
        """

    def close(self) -> None:
        """Close the connection."""


class Services(Protocol):
    """The part of a communicator that starts actors. Collective: all workers call both methods in the same order.

    Both methods return when all actors are connected. The payload of a message has at most 1 GiB, or as many bytes as
    the actor's attribute `largest_bytes`; a larger payload ends the connection. `Communicator.bytes_sent` counts a
    worker's calls, and the answers of the actor that it hosts, with their headers. It does not count messages between
    a worker and the actor that it hosts.
    """

    def host(self, actor: Actor) -> list[ActorConnection]:
        """Run `actor` next to this worker's training thread; returns connections to all workers' actors, by rank."""

    def serve(self, count: int, service: str, config: Mapping[str, Any]) -> list[ActorConnection]:
        """Start `count` actors in processes of their own; returns connections to them, by number.

        Worker ``i % size`` starts actor *i*. The processes end when the communicator is closed, and when the worker
        that started them ends, for whatever reason.

        Args:
            service: ``module:function``, called as ``function(i, config)`` in the new process; returns the actor.
            config: values that JSON can represent; the same on all workers.
        """
