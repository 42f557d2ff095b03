"""The actor of a server process, which has a shard of its own and a copy of the previous server's shard.

    worker ── push ─► server 0 ── the same push ─► server 1 ┐
           ◄─ answer ──────────◄─────── kept ───────────────┘     shard 0 is on server 0, its copy on server 1, etc.

A server forwards every message that may change its shard to the next server, which has the copy, in the order of
processing. It answers a worker only after the next server has all messages on which the answer depends. If a server is
lost, workers send their unanswered requests to the next server. Its copy contains everything that was answered, and it
serves the shard from then on. A server that was only unreachable learns this from the answer to the next message that
it forwards. It then redirects its workers to the next server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from unisono import notation
from unisono.comm.actor import ActorConnection, ActorMessage, Answer
from unisono.compress import BOUND_COMPRESSORS, Span
from unisono.sync.server.delay_compensation import COMPENSATIONS
from unisono.sync.server.shard import Shard, whole
from unisono.sync.server.slice_state import MessageRefused, ServerSlice, ServerTerms, SliceSpec

MOVED = ActorMessage("moved")
"""The answer of a server whose shard is now served by the next server, which had the copy."""


class Replication:
    """Forwards the messages of one shard to the server of its copy, and delays answers until they are acknowledged.

    Args:
        connection: the connection to the server of the copy; None: there is no copy.

    Attributes:
        superseded: whether the server of the copy serves the shard now.
    """

    def __init__(self, connection: ActorConnection | None) -> None:
        self._connection = connection
        self._sent = self._acknowledged = 0
        self._delayed: deque[tuple[int, Callable[[], None]]] = deque()
        self._unanswered: dict[int, Answer] = {}
        self._tickets = 0
        self.superseded = False

    def ticket(self, answer: Answer) -> int:
        """Register a request by its `answer`; returns the number under which it is answered."""
        self._tickets += 1
        self._unanswered[self._tickets] = answer
        return self._tickets

    def answer(self, ticket: int, message: ActorMessage) -> None:
        """Answer the request number `ticket`, unless it is already answered."""
        send = self._unanswered.pop(ticket, None)
        if send is not None:
            send(message)

    def begin(self) -> None:
        """Count a message that this server processes now and forwards afterwards."""
        self._sent += 1

    def cancel(self) -> None:
        """Undo `begin` for a message that was refused."""
        self._sent -= 1

    def forward(self, message: ActorMessage) -> None:
        """Forward a message to the server of the copy, after this server has processed it. No effect without a copy."""
        if self._connection is not None:
            self._connection.send(message, self._acknowledge)

    def after(self, act: Callable[[], None]) -> None:
        """Call ``act()`` once the server of the copy has acknowledged all messages so far."""
        if self._connection is None or self._acknowledged == self._sent:
            act()
        else:
            self._delayed.append((self._sent, act))

    def _acknowledge(self, answer: ActorMessage | None) -> None:
        self._acknowledged += 1
        if answer is None:
            self._connection = None  # the server of the copy is lost
        elif answer.kind == MOVED.kind:
            self.superseded, self._connection = True, None
            for ticket in list(self._unanswered):
                self.answer(ticket, MOVED)
        while self._delayed and (self._connection is None or self._delayed[0][0] <= self._acknowledged):
            self._delayed.popleft()[1]()


class ParameterServerActor:
    """The actor of one server process.

    Args:
        number: the number of this server, which is also that of its own shard.
        config: the config that `ParameterServer` has made for all servers.
    """

    def __init__(self, number: int, config: Mapping[str, Any]) -> None:
        self._number, self._servers, self._copies = number, config["servers"], config["copies"]
        terms, specs = server_terms(config["terms"]), slice_specs(config)
        self._own, self._predecessor = number, (number - 1) % self._servers
        mine = [self._own] if self._copies == 1 else [self._predecessor, self._own]
        self._shards = {s: Shard(terms, {i: spec for i, (shard, spec) in specs.items() if shard == s}) for s in mine}
        self._synchronous = terms.synchronous
        numel = sum(spec.numel for shard, spec in specs.values() if shard in mine)
        # The largest payload: all pushes of a worker, of 8 bytes a number, or a slice with its optimizer state.
        self.largest_bytes = (1 << 20) + 40 * numel + 64 * terms.control
        self._replication: dict[int, Replication] = {}
        self._lent: dict[int, list[tuple[ServerSlice, object]]] = {}

    def connected(self, connections: Sequence[ActorConnection]) -> None:
        """See `Actor`."""
        copy = connections[(self._number + 1) % self._servers] if self._copies == 2 else None
        self._replication[self._own] = Replication(copy)

    @torch.no_grad()
    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """Process a message. Raises `ValueError` if no worker or server of this run can have sent it."""
        for slice_, token in self._lent.pop(sender, ()):
            slice_.release(token)
        shard = whole(message.fields, "shard")
        if shard not in self._shards:
            raise MessageRefused(f"a message for shard {shard}, but server {self._number} has {sorted(self._shards)}")
        if sender >= 0:
            self._serve(shard, sender, message, answer)
        else:
            self._replicate(shard, sender, message, answer)

    def lost(self, sender: int) -> None:
        """See `Actor`."""
        for slice_, token in self._lent.pop(sender, ()):
            slice_.release(token)
        for shard in self._shards.values() if sender >= 0 else ():
            shard.lost(sender)

    def _serve(self, shard: int, worker: int, message: ActorMessage, answer: Answer) -> None:
        """Process a worker's message. The first one for a copy makes this server serve the shard of that copy."""
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
        slice_: ServerSlice | None,
    ) -> None:
        token = object()
        if slice_ is not None:
            slice_.lend(token)  # until the worker's next message

        def act() -> None:
            if slice_ is not None:
                self._lent.setdefault(worker, []).append((slice_, token))
            replication.answer(ticket, message)

        replication.after(act)

    def _replicate(self, shard: int, sender: int, message: ActorMessage, answer: Answer) -> None:
        """Process a message that the previous server has forwarded for the copy of its shard."""
        if -1 - sender != self._predecessor or shard != self._predecessor or shard == self._own:
            raise MessageRefused(
                f"server {-1 - sender} forwarded a message for shard {shard}, but server {self._number} has a copy "
                f"only of the shard of server {self._predecessor}"
            )
        if shard in self._replication:
            answer(MOVED)
            return
        # The answer frees the message's tensors at once, so totals that wait for other workers' pushes are copied.
        tensors = [x.clone() for x in message.tensors] if self._synchronous else message.tensors
        copied = ActorMessage(message.kind, message.fields, tensors)
        self._shards[shard].receive(whole(message.fields, "worker"), copied, lambda *_: None)
        answer(ActorMessage("kept"))


def serve(number: int, config: Mapping[str, Any]) -> ParameterServerActor:
    """Create the actor of a server; `Services.serve` calls this function in the server process."""
    return ParameterServerActor(number, config)


def server_terms(written: Mapping[str, Any]) -> ServerTerms:
    """Read the terms of a config."""
    text = written["compensate"]
    return ServerTerms(**{**written, "compensate": text and notation.parse("compensate", text, COMPENSATIONS)})


def slice_specs(config: Mapping[str, Any]) -> dict[int, tuple[int, SliceSpec]]:
    """Read the shard and the spec of every slice of a config, by the slice's number."""
    compressors = [notation.parse("compress", text, BOUND_COMPRESSORS) for text in config["compressors"]]
    specs = {}
    for number, each in enumerate(config["slices"]):
        spans = tuple(Span(name, torch.Size(shape), tuple(stride), start, stop)
                      for name, shape, stride, start, stop in each["spans"])  # fmt: skip
        spec = SliceSpec(spans, tuple(each["members"]), getattr(torch, each["dtype"]), compressors[each["compress"]])
        specs[number] = each["shard"], spec
    return specs
