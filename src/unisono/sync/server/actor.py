"""The server: a shard of its own, a copy of the one before it, and who answers for which.

    worker ── push ─► server 0 ── the same push ─► server 1 ┐
           ◄─ answer ──────────◄─────── kept ───────────────┘     shard 0 lives on 0, its copy on 1, and so on round

Whatever may change a shard is passed on to its copy, in the order in which it was taken, and no answer leaves before
the copy has all that the answer rests on. So a worker whose server is gone says again to the copy what was not
answered, and finds all that was. From then on the copy answers for the shard, and a server that was only thought to be
gone is told so by its next message to the copy, and sends its workers there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from unisono.comm.actor import ActorConnection, ActorMessage, Answer
from unisono.compress import Span
from unisono.sync.server.shard import Shard, whole
from unisono.sync.server.slice_state import MessageRefused, ServerSlice, ServerTerms, SliceSpec
from unisono.sync.server.value_codec import read

MOVED = ActorMessage("moved")
"""The answer of a server whose shard another one answers for."""


class Replication:
    """What was passed on to the copy, and the answers that wait until it is there."""

    def __init__(self, connection: ActorConnection | None) -> None:
        self._connection = connection
        self._sent = self._acknowledged = 0
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        self._asked: dict[int, Answer] = {}
        self._tickets = 0
        self.superseded = False

    def ticket(self, answer: Answer) -> int:
        """A message has come whose answer is due; its number."""
        self._tickets += 1
        self._asked[self._tickets] = answer
        return self._tickets

    def answer(self, ticket: int, message: ActorMessage) -> None:
        """Answer it, if it still waits."""
        answer = self._asked.pop(ticket, None)
        if answer is not None:
            answer(message)

    def begin(self) -> None:
        """A message is being taken that will be passed on."""
        self._sent += 1

    def cancel(self) -> None:
        """It was refused."""
        self._sent -= 1

    def forward(self, message: ActorMessage) -> None:
        """It was taken."""
        if self._connection is not None:
            self._connection.send(message, self._acknowledge)

    def after(self, act: Callable[[], None]) -> None:
        """``act()`` once the copy has everything so far."""
        if self._connection is None or self._acknowledged == self._sent:
            act()
        else:
            self._held.append((self._sent, act))

    def _acknowledge(self, answer: ActorMessage | None) -> None:
        self._acknowledged += 1
        if answer is None:
            self._connection = None  # there is no copy any more
        elif answer.kind == MOVED.kind:
            self.superseded, self._connection = True, None
            for ticket in list(self._asked):
                self.answer(ticket, MOVED)
        while self._held and (self._connection is None or self._held[0][0] <= self._acknowledged):
            self._held.popleft()[1]()


class ParameterServerActor:
    """The actor.

    Args:
        number: of this server, and of its shard.
        config: see `ParameterServer`, which writes it.
    """

    def __init__(self, number: int, config: Mapping[str, Any]) -> None:
        self._number, self._servers, self._copies = number, config["servers"], config["copies"]
        terms, specs = server_terms(config["terms"]), slice_specs(config)
        self._own, self._predecessor = number, (number - 1) % self._servers
        mine = [self._own] if self._copies == 1 else [self._predecessor, self._own]
        self._shards = {s: Shard(terms, {i: spec for i, (shard, spec) in specs.items() if shard == s}) for s in mine}
        self._synchronous = terms.synchronous
        numel = sum(spec.numel for shard, spec in specs.values() if shard in mine)
        # The largest is all pushes of a worker, of 8 bytes a number, or a slice with the state of its optimizer.
        self.largest_bytes = (1 << 20) + 40 * numel + 64 * terms.control
        self._replication: dict[int, Replication] = {}
        self._lent: dict[int, list[tuple[ServerSlice, object]]] = {}

    def connected(self, connections: Sequence[ActorConnection]) -> None:
        """See `Actor`."""
        copy = connections[(self._number + 1) % self._servers] if self._copies == 2 else None
        self._replication[self._own] = Replication(copy)

    @torch.no_grad()
    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """See `Actor`. Raises `ValueError` for what nobody of this run can have sent."""
        for server_slice, token in self._lent.pop(sender, ()):
            server_slice.release(token)
        shard = whole(message.fields, "shard")
        if shard not in self._shards:
            raise MessageRefused(f"shard {shard} is not here")
        if sender >= 0:
            self._serve(shard, sender, message, answer)
        else:
            self._replicate(shard, sender, message, answer)

    def lost(self, sender: int) -> None:
        """See `Actor`."""
        for server_slice, token in self._lent.pop(sender, ()):
            server_slice.release(token)
        for shard in self._shards.values() if sender >= 0 else ():
            shard.lost(sender)

    def _serve(self, shard: int, worker: int, message: ActorMessage, answer: Answer) -> None:
        """A worker speaks; by that, a copy becomes who answers."""
        replication = self._replication.setdefault(shard, Replication(None))
        if replication.superseded:
            answer(MOVED)
            return
        reply = partial(self._reply, replication, replication.ticket(answer), worker)
        if not self._shards[shard].changes(message):
            self._shards[shard].receive(worker, message, reply)
            return
        replication.begin()
        try:
            self._shards[shard].receive(worker, message, reply)
        except Exception:
            replication.cancel()
            raise
        replication.forward(ActorMessage(message.kind, {**message.fields, "worker": worker}, message.tensors))

    def _reply(
        self,
        replication: Replication,
        ticket: int,
        worker: int,
        message: ActorMessage,
        server_slice: ServerSlice | None,
    ) -> None:
        token = object()
        if server_slice is not None:
            server_slice.lend(token)  # from now on until the worker's next message

        def act() -> None:
            if server_slice is not None:
                self._lent.setdefault(worker, []).append((server_slice, token))
            replication.answer(ticket, message)

        replication.after(act)

    def _replicate(self, shard: int, sender: int, message: ActorMessage, answer: Answer) -> None:
        """The server before this one passes on what it has taken."""
        if -1 - sender != self._predecessor or shard != self._predecessor or shard == self._own:
            raise MessageRefused(f"actor {-1 - sender} does not keep shard {shard}")
        if shard in self._replication:
            answer(MOVED)
            return
        # It is answered at once, so what has to wait for others' pushes has to have memory of its own.
        tensors = [x.clone() for x in message.tensors] if self._synchronous else message.tensors
        copied = ActorMessage(message.kind, message.fields, tensors)
        self._shards[shard].receive(whole(message.fields, "worker"), copied, lambda *_: None)
        answer(ActorMessage("kept"))


def serve(number: int, config: Mapping[str, Any]) -> ParameterServerActor:
    """The service that `Services.serve` starts."""
    return ParameterServerActor(number, config)


def server_terms(written: Mapping[str, Any]) -> ServerTerms:
    """The terms in a config."""
    return ServerTerms(**{**written, "compensate": read(written["compensate"])})


def slice_specs(config: Mapping[str, Any]) -> dict[int, tuple[int, SliceSpec]]:
    """All slices of a config by number: shard and lot."""
    compressors = [read(each) for each in config["compressors"]]
    specs = {}
    for number, each in enumerate(config["slices"]):
        spans = tuple(Span(name, torch.Size(shape), tuple(stride), start, stop)
                      for name, shape, stride, start, stop in each["spans"])  # fmt: skip
        spec = SliceSpec(spans, tuple(each["members"]), getattr(torch, each["dtype"]), compressors[each["compress"]])
        specs[number] = each["shard"], spec
    return specs
