"""The state machine of one shard, which processes messages and answers them, without a transport.

    kind   fields                        tensors and effect
    init   slice, places                 weights and optimizer state, from one worker, before the first push
    push   slice, number, version, ...   the total of a worker; answered when its memory is free
    hear   round                         a worker's control word; answered with the sum of all workers' words
    norm   round                         answered with the squared norm of each piece of the mean gradient
    take   round, scale, groups          the optimizer's step of a round
    pull   slice, need, edition          answered with the newest weights, once all steps before `need` are applied
    level  slice                         the next answers to `pull` have the exact weights
    look   slice, state                  answered with the exact weights; with `state`, also the optimizer's state

The same messages in the same order give the same bits. The copy of a shard depends on that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unisono.comm.actor import ActorMessage
from unisono.sync.server.slice_state import MessageRefused, Push, ServerSlice, ServerTerms, SliceSpec
from unisono.sync.server.weight_deltas import saves_bytes

Reply = Callable[[ActorMessage, ServerSlice | None], None]
"""Answers a message. If a slice is given, its weights are in the answer, and must not change while that is read."""

WORKERS_LOST = "gone"
"""The kind of an answer that names lost workers, without which the request cannot be answered."""
ROUNDS_REMEMBERED = 2


class Shard:
    """The state of one shard, and the requests to it that are not answered yet.

    Args:
        specs: the specs of this shard's slices, by their numbers.
    """

    def __init__(self, terms: ServerTerms, specs: Mapping[int, SliceSpec]) -> None:
        self._terms, self._specs = terms, specs
        self._slices: dict[int, ServerSlice] = {}
        self._control_words: dict[int, dict[int, Tensor]] = {}
        self._control_requests: dict[int, list[Reply]] = {}
        self._norm_requests: list[tuple[int, Reply]] = []
        self._squares: dict[int, dict[str, list[float]]] = {}
        self._waiting: dict[int, Reply] = {}
        self._received = 0
        self._lost: set[int] = set()
        self._handlers = {
            "init": self._init, "push": self._join if terms.synchronous else self._add, "hear": self._control,
            "norm": self._norm, "take": self._take, "pull": self._pull, "level": self._level, "look": self._look,
        }  # fmt: skip
        pull_changes = any(saves_bytes(spec.compress, spec.spans, spec.numel, spec.dtype) for spec in specs.values())
        pull_changes = pull_changes or (terms.compensate is not None and terms.compensate.needs_old_weights)
        self._reads = {"look"} if pull_changes else {"look", "pull"}

    def changes(self, message: ActorMessage) -> bool:
        """Whether processing `message` may change the state of the shard."""
        if message.kind == "norm":
            return message.fields.get("round") not in self._squares
        return message.kind not in self._reads

    def receive(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        """Process `message`, and call `reply` once, now or later.

        Raises:
            ValueError: no worker can have sent `message`; the state has not changed.
        """
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise MessageRefused(f"a message of kind {message.kind!r}, which is none of {', '.join(self._handlers)}")
        if not 0 <= worker < self._terms.workers:
            raise MessageRefused(f"a message of worker {worker}, but the run has {self._terms.workers} workers")
        self._received += 1
        self._waiting[self._received] = reply
        try:
            handler(worker, message, partial(self._answer, self._received))
        except Exception:
            self._waiting.pop(self._received, None)
            raise
        self._fail_waiting()

    def lost(self, worker: int) -> None:
        """Record the loss of `worker`; a synchronous shard then answers all open requests with `WORKERS_LOST`."""
        self._lost.add(worker)
        self._fail_waiting()

    def _answer(self, number: int, message: ActorMessage, slice_: ServerSlice | None) -> None:
        reply = self._waiting.pop(number, None)
        if reply is not None:
            reply(message, slice_)

    def _fail_waiting(self) -> None:
        if self._lost and self._terms.synchronous:
            for number in list(self._waiting):
                self._answer(number, ActorMessage(WORKERS_LOST, {"workers": sorted(self._lost)}), None)

    def _init(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        number, spec = self._spec(message.fields)
        if number in self._slices and self._slices[number].begun:
            raise MessageRefused(f"initial weights for slice {number}, for which gradients were already pushed")
        places = message.fields.get("places")
        if not isinstance(places, list) or len(message.tensors) != 1 + len(places):
            raise MessageRefused(
                f"{len(message.tensors)} tensors with places={places!r}, where the weights and a tensor for each place "
                "are expected"
            )
        _check(message.tensors[0], spec.numel, spec.dtype)
        weights, *state = message.tensors
        self._slices[number] = ServerSlice(spec, self._terms, weights, places, state)
        reply(ActorMessage("kept"), None)

    def _join(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        slice_ = self._slice(message.fields)
        slice_.add_to_round(self._pushed(worker, slice_.spec, message), lambda: reply(ActorMessage("taken"), None))
        self._answer_norms()

    def _add(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        slice_ = self._slice(message.fields)
        groups = slice_.optimizer.check(message.fields.get("groups"), len(self._terms.groups))
        added = slice_.add_push(self._pushed(worker, slice_.spec, message), groups)
        reply(ActorMessage("taken" if added else "dropped"), None)

    def _pushed(self, worker: int, spec: SliceSpec, message: ActorMessage) -> Push:
        fields = message.fields
        used = fields.get("used")
        if not isinstance(used, list) or len(used) != len(spec.spans) or not all(isinstance(u, bool) for u in used):
            raise MessageRefused(f"used={used!r} is not a truth value for each of {len(spec.spans)} pieces")
        if len(message.tensors) != any(used):
            raise MessageRefused(f"{len(message.tensors)} tensors with used={used!r}, not {int(any(used))}")
        total = None
        if message.tensors:
            (encoded,) = message.tensors
            blank = spec.compress.blank(spec.spans, spec.numel, spec.dtype, torch.device("meta"))
            _check(encoded, blank.numel(), blank.dtype)
            total = spec.compress.decode(encoded, spec.spans, spec.numel, spec.dtype)
        return Push(worker, whole(fields, "number", 1), total, used, whole(fields, "version"), whole(fields, "tick"),
                    whole(fields, "count", 1), finite(fields, "scale"))  # fmt: skip

    def _control(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        """Sum the control words of a round, which are kept until no worker can request them again."""
        round_ = whole(message.fields, "round", 1)
        if len(message.tensors) != 1:
            raise MessageRefused(f"{len(message.tensors)} tensors where one control word is expected")
        _check(message.tensors[0], self._terms.control, torch.float64)
        words = self._control_words.setdefault(round_, {})
        words[worker] = message.tensors[0].clone()
        self._control_words = {r: each for r, each in self._control_words.items() if r > round_ - ROUNDS_REMEMBERED}
        requests = self._control_requests.setdefault(round_, [])
        requests.append(reply)
        if len(words) == self._terms.workers:
            control = torch.stack([words[w] for w in sorted(words)]).sum(0)
            for send in self._control_requests.pop(round_):
                send(ActorMessage("heard", {}, [control]), None)
        self._control_requests = {
            r: waiting for r, waiting in self._control_requests.items() if r in self._control_words
        }

    def _norm(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        """Answer with the norms of a round. These are kept, because one worker may be a round ahead of the others."""
        self._norm_requests.append((whole(message.fields, "round", 1), reply))
        self._answer_norms()

    def _answer_norms(self) -> None:
        rounds = {slice_.round_sum.round if slice_.round_sum.complete else 0 for slice_ in self._slices.values()}
        for round_ in {r for r, _ in self._norm_requests} - set(self._squares):
            if rounds <= {round_}:
                self._squares = {r: known for r, known in self._squares.items() if r > round_ - ROUNDS_REMEMBERED}
                self._squares[round_] = {str(number): slice_.squares() for number, slice_ in self._slices.items()}
        ready = [(r, reply) for r, reply in self._norm_requests if r in self._squares]
        self._norm_requests = [each for each in self._norm_requests if each[0] not in self._squares]
        for r, reply in ready:
            reply(ActorMessage("norm", self._squares[r]), None)

    def _take(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        round_, scale = whole(message.fields, "round", 1), finite(message.fields, "scale")
        slices = self._all_slices()
        groups = slices[0].optimizer.check(message.fields.get("groups"), len(self._terms.groups)) if slices else []
        for slice_ in slices:
            slice_.take(round_, scale, groups)
        reply(ActorMessage("taken"), None)

    def _pull(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        slice_, delta_number = self._slice(message.fields), whole(message.fields, "edition")
        slice_.when_reached(
            whole(message.fields, "need"), partial(self._send_update, worker, slice_, delta_number, reply)
        )

    def _send_update(self, worker: int, slice_: ServerSlice, delta_number: int, reply: Reply) -> None:
        update, lent = slice_.update(worker, delta_number)
        reply(update, slice_ if lent else None)

    def _level(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        self._slice(message.fields).publish_exact()
        reply(ActorMessage("level"), None)

    def _look(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        slice_ = self._slice(message.fields)
        reply(slice_.read_state(whole(message.fields, "state") > 0), slice_)

    def _spec(self, fields: Mapping[str, Any]) -> tuple[int, SliceSpec]:
        number = whole(fields, "slice")
        if number not in self._specs:
            raise MessageRefused(f"a message for slice {number}, which is not a slice of this shard")
        return number, self._specs[number]

    def _slice(self, fields: Mapping[str, Any]) -> ServerSlice:
        number, _ = self._spec(fields)
        if number not in self._slices:
            raise MessageRefused(f"a message for slice {number}, whose initial weights have not arrived yet")
        return self._slices[number]

    def _all_slices(self) -> list[ServerSlice]:
        if len(self._slices) < len(self._specs):
            raise MessageRefused(
                f"a step is due, but initial weights have arrived for only {len(self._slices)} of "
                f"{len(self._specs)} slices"
            )
        return list(self._slices.values())


def whole(fields: Mapping[str, Any], name: str, least: int = 0) -> int:
    """The field `name`, a whole number from `least`. Raises `MessageRefused`."""
    value = fields.get(name)
    if type(value) is not int or not least <= value < 1 << 62:
        raise MessageRefused(f"{name}={value!r} is not a whole number from {least}")
    return value


def finite(fields: Mapping[str, Any], name: str) -> float:
    """The field `name`, a finite number. Raises `MessageRefused`."""
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise MessageRefused(f"{name}={value!r} is not a finite number")
    return float(value)


def _check(tensor: Tensor, numel: int, dtype: torch.dtype) -> None:
    if tensor.numel() != numel or tensor.dtype != dtype:
        raise MessageRefused(f"a tensor of {tensor.numel()} x {tensor.dtype}, where {numel} x {dtype} is expected")
