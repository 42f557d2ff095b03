"""A worker's end: calls that outlive the server they were made to."""

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
    """The `Work` of a call to whoever answers for a shard."""

    def __init__(self, to: ShardClient, message: ActorMessage) -> None:
        self._to, self.message = to, message
        self.send()

    @property
    def answered(self) -> bool:
        """Whether the answer was waited for; the message's tensors are then free again."""
        return self._work is None

    def send(self) -> None:
        """Say it, perhaps once more, to whoever answers now."""
        self._sent_to = self._to.current
        self._work: Work[ActorMessage] | None = self._to.connection.call(self.message)

    def abandon(self) -> None:
        """Its answer does not matter any more."""
        self._to.done(self)

    def wait(self) -> ActorMessage:
        """The answer; its tensors are valid until the next call that is waited for. Raises `PeerLost` if nobody is
        left who could give it, or a worker is gone that it depends on."""
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
            raise PeerLost(answer.fields["workers"], self.message.kind, "a server waits for it in vain")
        self._work = None
        self._to.done(self)
        return answer

    def poll(self) -> None:
        """Let the answer arrive although nobody waits for it yet."""
        if self._work is not None:
            self._work.poll()


class ShardClient:
    """With the server of one shard, and with that of its copy when the first is gone.

    Args:
        lines: to all servers that have the shard, the first one first.
    """

    def __init__(self, shard: int, connections: Sequence[ActorConnection]) -> None:
        self._shard, self._connections = shard, connections
        self._open: list[ShardCall] = []
        self.current = 0

    @property
    def connection(self) -> ActorConnection:
        """The line to whoever answers now."""
        return self._connections[self.current]

    def call(self, kind: str, fields: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> ShardCall:
        """Ask; the tensors, wherever they lie, belong to the call until it is answered."""
        flat = [tensor.detach().reshape(-1).cpu() for tensor in tensors]
        self._open.append(ShardCall(self, ActorMessage(kind, {"shard": self._shard, **fields}, flat)))
        return self._open[-1]

    def listen(self) -> None:
        """All answers are to arrive although nobody waits for them yet."""
        if self._open:
            self._open[-1].poll()

    def done(self, call: ShardCall) -> None:
        """`call` is answered."""
        self._open.remove(call)

    def fail_over(self, failed: int, error: PeerLost) -> None:
        """Who was talked to as number `failed` is gone: say everything that is open to the next, in order."""
        if failed == self.current:
            if self.current + 1 == len(self._connections):
                raise error
            self.current += 1
            for call in self._open:
                call.send()
