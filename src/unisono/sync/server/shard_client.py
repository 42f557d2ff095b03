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
    """The `Work` of a call to the server of a shard, sent again to the copy if the server is lost."""

    def __init__(self, to: ShardClient, message: ActorMessage) -> None:
        self._to, self.message = to, message
        self.send()

    @property
    def answered(self) -> bool:
        """Whether `wait` has returned; the message's tensors may then be overwritten."""
        return self._work is None

    def send(self) -> None:
        """Send the message, perhaps again, to the current server."""
        self._sent_to = self._to.current
        self._work: Work[ActorMessage] | None = self._to.connection.call(self.message)

    def abandon(self) -> None:
        """Ignore the answer."""
        self._to.done(self)

    def wait(self) -> ActorMessage:
        """The answer; its tensors are valid until the next call's `wait`.

        Raises:
            PeerLost: all servers of the shard are lost, or a worker on which the answer depends.
        """
        while True:
            assert self._work is not None
            try:
                answer = self._work.wait()
                if answer.kind != MOVED.kind:
                    break
                self._to.fail_over(self._sent_to, PeerLost((), self.message.kind, "its server has been replaced"))
            except PeerLost as error:
                self._to.fail_over(self._sent_to, error)
        if answer.kind == WORKERS_LOST:
            raise PeerLost(answer.fields["workers"], self.message.kind, "a server reports that it is lost")
        self._work = None
        self._to.done(self)
        return answer

    def poll(self) -> None:
        """Receive the answer, if it has arrived, without waiting."""
        if self._work is not None:
            self._work.poll()


class ShardClient:
    """Calls the server of one shard, and the server of its copy once the first is lost.

    Args:
        connections: to all servers that have the shard, in order.

    Attributes:
        current: the index of the server that is called.
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
        """Send a request; the tensors, on any device, must not change until it is answered."""
        flat = [tensor.detach().reshape(-1).cpu() for tensor in tensors]
        self._open.append(ShardCall(self, ActorMessage(kind, {"shard": self._shard, **fields}, flat)))
        return self._open[-1]

    def listen(self) -> None:
        """Receive answers that have arrived, without waiting."""
        if self._open:
            self._open[-1].poll()

    def done(self, call: ShardCall) -> None:
        """Remove `call`, which is answered or abandoned."""
        self._open.remove(call)

    def fail_over(self, failed: int, error: PeerLost) -> None:
        """Send all open calls, in order, to the next server, because number `failed` is lost. Raises `error` if there
        is none."""
        if failed == self.current:
            if self.current + 1 == len(self._connections):
                raise error
            self.current += 1
            for call in self._open:
                call.send()
