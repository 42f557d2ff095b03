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
        kind: of the request or answer.
        fields: small values that JSON can represent.
        tensors: flat, contiguous, on the CPU; their bytes are sent as they are in memory.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()


Answer = Callable[[ActorMessage], None]


class Actor(Protocol):
    """A service that receives one message at a time. Its methods never block."""

    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """Process `message` of worker `sender` (or of actor ``-1 - i``).

        Call `answer` exactly once: now, or within a later `receive`, `lost` or callback of a `send`. The tensors are
        the transport's memory, which the sender's next message overwrites: copy what is kept after the answer. Until
        then the actor may write into them and send them back. The tensors of an answer are read until the sender's
        next message arrives, so do not write into them before. An exception ends that sender's connection only.
        """

    def lost(self, sender: int) -> None:
        """`sender` is lost. Its requests need not be answered."""

    def connected(self, peers: Sequence[ActorConnection]) -> None:
        """Called once, before the first message, with connections to all actors of the same `serve`, by number."""


class ActorConnection(Protocol):
    """A connection to one actor. Messages arrive in the order in which they were sent."""

    def call(self, message: ActorMessage) -> Work[ActorMessage]:
        """Send `message`; the result of the work is the answer.

        Several calls may be in flight, and answers may come in any order. The tensors of `message` belong to the
        connection until its answer has arrived. The tensors of an answer are valid until the next `call` whose work
        has been waited for.

        Raises (in `wait`): `PeerLost` when the actor has ended, or has not answered by the deadline. Its `ranks` are
        the worker that hosts or has started the actor, and its text names the actor.
        """

    def send(self, message: ActorMessage, then: Callable[[ActorMessage | None], None]) -> None:
        """For actors: send `message`, and call ``then(answer)`` when the answer arrives; None: the other actor is lost.

        The tensors are copied. `then` is called like `receive`: never during another call of the actor.
        """

    def close(self) -> None:
        """Close the connection."""


class Services(Protocol):
    """What a communicator offers besides its operations. Collective: all workers call these in the same order.

    Both return when all actors are connected. A payload has at most 1 GiB, or the actor's `largest_bytes`; a larger
    one ends the connection. Calls count in `bytes_sent` with their headers, and so do the answers of an actor that a
    worker hosts. Messages of a worker to itself do not.
    """

    def host(self, actor: Actor) -> list[ActorConnection]:
        """Run `actor` next to this worker's training thread; returns connections to all workers' actors, by rank."""

    def serve(self, count: int, service: str, config: Mapping[str, Any]) -> list[ActorConnection]:
        """Start `count` actors in processes of their own, number *i* by worker ``i % size``; returns connections.

        Args:
            service: ``module:function``, called as ``function(i, config)`` in the new process; returns the actor.
            config: values that JSON can represent; the same on all workers.

        The processes end with the communicator, and with the worker that started them, however it ends.
        """
