"""A worker's client of one shard, whose calls survive the loss of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from unisono.comm import Work
from unisono.comm.actor import ActorConnection, ActorMessage
from unisono.errors import PeerLost
from unisono.sync.server.actor import MOVED
from unisono.sync.server.shard import WORKERS_LOST


class ShardCall:
    """A request to the server of a shard. If the server is lost, the request is sent to the server of the copy."""

    def __init__(self, to: ShardClient, message: ActorMessage) -> None:
        self._to, self.message = to, message
        self.send()

    @property
    def answered(self) -> bool:
        """Whether `wait` has returned; the message's tensors may then be overwritten."""
        return self._work is None

    def send(self) -> None:
        """Send the request to the shard's current server; called again after the previous server is lost."""
        self._sent_to = self._to.current
        self._work: Work[ActorMessage] | None = self._to.connection.call(self.message)

    def abandon(self) -> None:
        """Ignore the answer."""
        self._to.done(self)

    def wait(self) -> ActorMessage:
        """Wait for the answer, and return it. Its tensors are valid until `wait` of the next call.

        Raises:
            PeerLost: all servers of the shard are lost, or a worker on which the answer depends is lost.
        """
        while True:
            assert self._work is not None
            try:
                answer = self._work.wait()
                if answer.kind != MOVED.kind:
                    break
                self._to.fail_over(self._sent_to, PeerLost((), self.message.kind, "another server has the shard now"))
            except PeerLost as error:
                self._to.fail_over(self._sent_to, error)
        if answer.kind == WORKERS_LOST:
            raise PeerLost(answer.fields["workers"], self.message.kind, "a parameter server reports the loss")
        self._work = None
        self._to.done(self)
        return answer

    def poll(self) -> None:
        """Receive the answer, if it has arrived, without waiting."""
        if self._work is not None:
            self._work.poll()


class ShardClient:
    """Calls the server of one shard, and the server of its copy once the first server is lost.

    Args:
        connections: connections to all servers that have the shard, in the order in which they serve it.

    Attributes:
        current: the index in `connections` of the server that serves the shard now.
    """

    def __init__(self, shard: int, connections: Sequence[ActorConnection]) -> None:
        self._shard, self._connections = shard, connections
        self._open: list[ShardCall] = []
        self.current = 0

    @property
    def connection(self) -> ActorConnection:
        """The connection to the current server."""
        return self._connections[self.current]

    def call(self, kind: str, fields: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> ShardCall:
        """Send a request. Its tensors, on any device, must not change until it is answered."""
        flat = [tensor.detach().reshape(-1).cpu() for tensor in tensors]
        self._open.append(ShardCall(self, ActorMessage(kind, {"shard": self._shard, **fields}, flat)))
        return self._open[-1]

    def listen(self) -> None:
        """Receive answers that have arrived, without waiting."""
        if self._open:
            self._open[-1].poll()

    def done(self, call: ShardCall) -> None:
        """Forget `call`, which is answered or abandoned."""
        self._open.remove(call)

    def fail_over(self, failed: int, error: PeerLost) -> None:
        """Send all open calls, in order, to the next server, because the server at index `failed` is lost.

        Raises `error` if there is no next server.
        """
        if failed == self.current:
            if self.current + 1 == len(self._connections):
                raise error
            self.current += 1
            for call in self._open:
                call.send()
