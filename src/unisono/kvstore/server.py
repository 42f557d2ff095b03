"""The values that one worker stores, as an actor: messages in, answers out.

    kind    fields                 tensors and effect
    init    key, part, shape       the value, from worker 0, before all others
    push    key, part, compress    a gradient, or its compressed message; answered when it is applied
    pull    key, part              answered with the value that includes all pushes of the sender
    rows    key, part              numbers of rows; answered with these rows, which include the same
    state   key, part              answered with the state of the part's optimizer
    load    key, part, shapes      the state of the part's optimizer

A synchronous server adds one push of each worker, in the order of ranks, and applies the sum. An asynchronous one
applies each push as it comes. Each worker hosts such an actor, so an updater is a function of its own process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unisono.comm import ActorConnection, ActorMessage, Answer
from unisono.elastic.extra_state import from_tensors, to_tensors
from unisono.errors import printable
from unisono.kvstore.arrays import Key
from unisono.kvstore.gradient_compression import compressor_of
from unisono.kvstore.updates import OptimizerStep, Replacement, StoredPart, Update
from unisono.sync.server.slice_state import MessageRefused

DONE = ActorMessage("done")
FAILED = "failed"
"""The kind of an answer that says why an update failed, as the field ``error``."""
WORKERS_LOST = "lost"
"""The kind of an answer that depends on the lost ``workers``."""
STATE = "state"
"""The name of a state that is sent as tensors."""


@dataclass
class _Entry:
    """A stored part, and the requests that wait for it.

    Args:
        pushes: by worker, those of the round that is not complete.
        reads: of workers whose push is among them.
        failure: why the last update failed; from then on, the answer to every request.
    """

    part: StoredPart
    pushes: dict[int, tuple[Tensor, Answer]] = field(default_factory=dict)
    reads: list[tuple[Answer, Callable[[], ActorMessage]]] = field(default_factory=list)
    failure: str = ""


class ValueServer:
    """The `Actor` that stores a worker's part of the values.

    Args:
        workers: of the run.
        synchronous: whether a push waits for those of all workers.

    Attributes:
        update: what is done with pushes. The worker that hosts this actor sets it while no push is in flight.
    """

    def __init__(self, workers: int, synchronous: bool) -> None:
        self._workers, self._synchronous = workers, synchronous
        self.update: Update = Replacement()
        self._entries: dict[tuple[Key, int], _Entry] = {}
        self._lost: set[int] = set()
        self._handlers = {
            "init": self._init, "push": self._push, "pull": self._pull, "rows": self._rows, "state": self._state,
            "load": self._load,
        }  # fmt: skip

    def connected(self, peers: Sequence[ActorConnection]) -> None:
        """See `Actor`."""

    @torch.no_grad()
    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """See `Actor`. Raises `MessageRefused`."""
        handler = self._handlers.get(message.kind)
        if handler is None or not 0 <= sender < self._workers:
            raise MessageRefused(f"{message.kind!r} of sender {sender}")
        handler(sender, message, answer)

    def lost(self, sender: int) -> None:
        """See `Actor`. Rounds that need a push of `sender` will never be complete."""
        if sender < 0 or not self._synchronous:
            return
        self._lost.add(sender)
        for entry in self._entries.values():
            waiting = [answer for _, answer in entry.pushes.values()] + [answer for answer, _ in entry.reads]
            entry.pushes.clear()
            entry.reads.clear()
            for answer in waiting:
                answer(self._loss())

    def _init(self, worker: int, message: ActorMessage, answer: Answer) -> None:
        place, shape = _place(message.fields), _shape(message.fields.get("shape"))
        if place in self._entries or len(message.tensors) != 1 or message.tensors[0].numel() != math.prod(shape):
            raise MessageRefused(f"a value for {place} of shape {shape}")
        value = message.tensors[0].view(shape).clone()
        self._entries[place] = _Entry(StoredPart(*place, value, message.fields.get("numpy") is True))
        answer(DONE)

    def _push(self, worker: int, message: ActorMessage, answer: Answer) -> None:
        entry = self._entry(message.fields)
        received = _received(entry.part.value, message)
        if not self._synchronous:
            self._apply(entry, received)
            answer(_outcome(entry))
        elif self._lost:
            answer(self._loss())
        elif worker in entry.pushes:
            raise MessageRefused(f"a second push of worker {worker} in one round")
        else:
            entry.pushes[worker] = received, answer
            if len(entry.pushes) == self._workers:
                self._complete(entry)

    def _complete(self, entry: _Entry) -> None:
        """Apply the sum of all pushes, and answer what waits for it."""
        pushes, entry.pushes = [entry.pushes[worker] for worker in sorted(entry.pushes)], {}
        total = pushes[0][0]
        for received, _ in pushes[1:]:
            total += received
        self._apply(entry, total)
        for _, answer in pushes:
            answer(_outcome(entry))
        reads, entry.reads = entry.reads, []
        for answer, read in reads:
            answer(read())

    def _apply(self, entry: _Entry, received: Tensor) -> None:
        if entry.failure:
            return
        try:
            self.update.apply(entry.part, received)
        except Exception as error:  # the caller's own function: the workers report it
            entry.failure = printable(f"{type(error).__name__}: {error}".split("\n")[0])

    def _pull(self, worker: int, message: ActorMessage, answer: Answer) -> None:
        entry = self._entry(message.fields)
        # With rounds, the value does not change before the next push of this worker, which follows this answer.
        copied = (lambda x: x) if self._synchronous else torch.clone
        self._read(worker, entry, answer, lambda: ActorMessage("value", {}, [copied(entry.part.value)]))

    def _rows(self, worker: int, message: ActorMessage, answer: Answer) -> None:
        entry = self._entry(message.fields)
        value = entry.part.value
        (numbers,) = message.tensors
        if numbers.dtype != torch.int64 or value.dim() == 0 or (len(numbers) and _outside(numbers, len(value))):
            raise MessageRefused("rows that the value does not have")
        numbers = numbers.clone()
        self._read(worker, entry, answer, lambda: ActorMessage("value", {}, [value.index_select(0, numbers)]))

    def _read(self, worker: int, entry: _Entry, answer: Answer, read: Callable[[], ActorMessage]) -> None:
        """Answer with ``read()`` once the pushes of `worker` are applied."""

        def outcome() -> ActorMessage:
            return _outcome(entry) if entry.failure else read()

        if worker in entry.pushes:
            entry.reads.append((answer, outcome))
        else:
            answer(outcome())

    def _state(self, worker: int, message: ActorMessage, answer: Answer) -> None:
        entry = self._entry(message.fields)
        if not isinstance(self.update, OptimizerStep):
            raise MessageRefused("the state of an optimizer, where there is none")
        tensors = to_tensors(STATE, self.update.state(entry.part))
        shapes = {name: list(x.shape) for name, x in tensors.items()}
        answer(ActorMessage("value", {"shapes": shapes}, list(tensors.values())))

    def _load(self, worker: int, message: ActorMessage, answer: Answer) -> None:
        entry = self._entry(message.fields)
        if not isinstance(self.update, OptimizerStep):
            raise MessageRefused("a state for an optimizer, where there is none")
        content = received_state(message)
        try:
            self.update.restore(entry.part, content["state"], content["groups"])
        except Exception as error:  # the optimizer's class may be the caller's own
            answer(ActorMessage(FAILED, {"error": printable(f"{type(error).__name__}: {error}".split("\n")[0])}))
        else:
            answer(DONE)

    def _entry(self, fields: Mapping[str, Any]) -> _Entry:
        entry = self._entries.get(_place(fields))
        if entry is None:
            raise MessageRefused(f"{_place(fields)} is not stored here")
        return entry

    def _loss(self) -> ActorMessage:
        return ActorMessage(WORKERS_LOST, {"workers": sorted(self._lost)})


def received_state(message: ActorMessage) -> Any:
    """What `to_tensors` made the tensors of `message` of."""
    shapes = message.fields["shapes"]
    tensors = {name: x.view(_shape(shapes[name])) for name, x in zip(shapes, message.tensors, strict=True)}
    return from_tensors(STATE, tensors)


def _received(value: Tensor, message: ActorMessage) -> Tensor:
    """The gradient in a push, in the shape of `value`."""
    params = message.fields.get("compress")
    (sent,) = message.tensors
    if params is not None:
        sent = compressor_of(params).decode(sent, (), value.numel(), torch.float32)
    if sent.dtype != value.dtype or sent.numel() != value.numel():
        raise MessageRefused(f"{sent.numel()} x {sent.dtype} for a value of {value.numel()} x {value.dtype}")
    return sent.view(value.shape)


def _outcome(entry: _Entry) -> ActorMessage:
    return ActorMessage(FAILED, {"error": entry.failure}) if entry.failure else DONE


def _outside(numbers: Tensor, rows: int) -> bool:
    return bool(numbers.min() < 0) or bool(numbers.max() >= rows)


def _place(fields: Mapping[str, Any]) -> tuple[Key, int]:
    key, part = fields.get("key"), fields.get("part")
    if not isinstance(key, int | str) or isinstance(key, bool) or type(part) is not int:
        raise MessageRefused(f"part {part!r} of key {key!r}")
    return key, part


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise MessageRefused(f"a shape of {shape!r}")
    return tuple(shape)
