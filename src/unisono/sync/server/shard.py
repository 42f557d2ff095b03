"""Some slices and what is agreed on about them: messages in, answers out, without any transport.

    init   slice, places                 weights and optimizer state          from one worker, before anything is pushed
    push   slice, number, version, ...   the total of a worker                answered when its memory is free
    hear   round                         a worker's control word              answered with the sum when all have come
    norm   round                                                              answered with each piece's squared norm
    take   round, scale, groups                                               the step of a round
    pull   slice, need, edition                                               answered when all before step `need` is in
    level  slice                                                              next, workers get the weights to the bit
    look   slice, state                  the weights as they are, and the optimizer's state if that is not 0

The same messages in the same order make the same bits, which is what a copy of a shard lives on.
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
from unisono.sync.server.weight_deltas import pays

Reply = Callable[[ActorMessage, ServerSlice | None], None]
"""Answers a message; the keeper, if any, is that whose weights are the answer's memory."""

WORKERS_LOST = "gone"
"""The kind of an answer that says which workers are waited for in vain."""
ROUNDS_REMEMBERED = 2


class Shard:
    """The state of one shard.

    Args:
        lots: the slices of this shard, by their numbers.
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
        has_velocity = any(pays(spec.compress, spec.spans, spec.numel, spec.dtype) for spec in specs.values())
        has_velocity = has_velocity or (terms.compensate is not None and terms.compensate.needs_old_weights)
        self._reads = {"look"} if has_velocity else {"look", "pull"}

    def changes(self, message: ActorMessage) -> bool:
        """Whether `message` may change anything. Norms are remembered."""
        if message.kind == "norm":
            return message.fields.get("round") not in self._squares
        return message.kind not in self._reads

    def receive(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        """Take `message`, and call `reply` once, now or later. Raises `ValueError` for what no worker can have sent,
        and has then changed nothing."""
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise MessageRefused(f"{message.kind!r} is none of {', '.join(self._handlers)}")
        if not 0 <= worker < self._terms.workers:
            raise MessageRefused(f"worker {worker} is none of {self._terms.workers}")
        self._received += 1
        self._waiting[self._received] = reply
        try:
            handler(worker, message, partial(self._answer, self._received))
        except Exception:
            self._waiting.pop(self._received, None)
            raise
        self._fail_waiting()

    def lost(self, worker: int) -> None:
        """`worker` will say nothing more: in lockstep, who waits for it waits in vain."""
        self._lost.add(worker)
        self._fail_waiting()

    def _answer(self, number: int, message: ActorMessage, server_slice: ServerSlice | None) -> None:
        reply = self._waiting.pop(number, None)
        if reply is not None:
            reply(message, server_slice)

    def _fail_waiting(self) -> None:
        if self._lost and self._terms.synchronous:
            for number in list(self._waiting):
                self._answer(number, ActorMessage(WORKERS_LOST, {"workers": sorted(self._lost)}), None)

    def _init(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        number, spec = self._spec(message.fields)
        if number in self._slices and self._slices[number].begun:
            raise MessageRefused(f"slice {number} is in training already")
        places = message.fields.get("places")
        if not isinstance(places, list) or len(message.tensors) != 1 + len(places):
            raise MessageRefused("weights, and a tensor for each place, are due")
        _check(message.tensors[0], spec.numel, spec.dtype)
        weights, *state = message.tensors
        self._slices[number] = ServerSlice(spec, self._terms, weights, places, state)
        reply(ActorMessage("kept"), None)

    def _join(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        server_slice = self._slice(message.fields)
        server_slice.add_to_round(
            self._pushed(worker, server_slice.spec, message), lambda: reply(ActorMessage("taken"), None)
        )
        self._answer_norms()

    def _add(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        server_slice = self._slice(message.fields)
        groups = server_slice.optimizer.check(message.fields.get("groups"), len(self._terms.groups))
        kept = server_slice.add_push(self._pushed(worker, server_slice.spec, message), groups)
        reply(ActorMessage("taken" if kept else "dropped"), None)

    def _pushed(self, worker: int, spec: SliceSpec, message: ActorMessage) -> Push:
        fields = message.fields
        used = fields.get("used")
        if not isinstance(used, list) or len(used) != len(spec.spans) or not all(isinstance(u, bool) for u in used):
            raise MessageRefused(f"used={used!r}: a truth value for each of {len(spec.spans)} pieces is due")
        if len(message.tensors) != any(used):
            raise MessageRefused(f"{len(message.tensors)} tensors for used={used!r}")
        total = None
        if message.tensors:
            (said,) = message.tensors
            blank = spec.compress.blank(spec.spans, spec.numel, spec.dtype, torch.device("meta"))
            _check(said, blank.numel(), blank.dtype)
            total = spec.compress.decode(said, spec.spans, spec.numel, spec.dtype)
        return Push(worker, whole(fields, "number", 1), total, used, whole(fields, "version"), whole(fields, "tick"),
                    whole(fields, "count", 1), finite(fields, "scale"))  # fmt: skip

    def _control(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        """What was heard of a round is remembered until no worker can ask for it again."""
        round_ = whole(message.fields, "round", 1)
        if len(message.tensors) != 1:
            raise MessageRefused(f"{len(message.tensors)} tensors; a control word is due")
        _check(message.tensors[0], self._terms.control, torch.float64)
        words = self._control_words.setdefault(round_, {})
        words[worker] = message.tensors[0].clone()
        self._control_words = {r: said for r, said in self._control_words.items() if r > round_ - ROUNDS_REMEMBERED}
        requests = self._control_requests.setdefault(round_, [])
        requests.append(reply)
        if len(words) == self._terms.workers:
            heard = torch.stack([words[w] for w in sorted(words)]).sum(0)
            for each in self._control_requests.pop(round_):
                each(ActorMessage("heard", {}, [heard]), None)
        self._control_requests = {
            r: waiting for r, waiting in self._control_requests.items() if r in self._control_words
        }

    def _norm(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        """Who asks first may be at the next round before others have asked, so norms are remembered as words are."""
        self._norm_requests.append((whole(message.fields, "round", 1), reply))
        self._answer_norms()

    def _answer_norms(self) -> None:
        rounds = {
            server_slice.round_sum.round if server_slice.round_sum.complete else 0
            for server_slice in self._slices.values()
        }
        for round_ in {r for r, _ in self._norm_requests} - set(self._squares):
            if rounds <= {round_}:
                self._squares = {r: known for r, known in self._squares.items() if r > round_ - ROUNDS_REMEMBERED}
                self._squares[round_] = {
                    str(number): server_slice.squares() for number, server_slice in self._slices.items()
                }
        ready = [(r, reply) for r, reply in self._norm_requests if r in self._squares]
        self._norm_requests = [each for each in self._norm_requests if each[0] not in self._squares]
        for r, reply in ready:
            reply(ActorMessage("norm", self._squares[r]), None)

    def _take(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        round_, scale = whole(message.fields, "round", 1), finite(message.fields, "scale")
        server_slices = self._all_slices()
        groups = (
            server_slices[0].optimizer.check(message.fields.get("groups"), len(self._terms.groups))
            if server_slices
            else []
        )
        for server_slice in server_slices:
            server_slice.take(round_, scale, groups)
        reply(ActorMessage("taken"), None)

    def _pull(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        server_slice, delta_number = self._slice(message.fields), whole(message.fields, "edition")
        server_slice.when_reached(
            whole(message.fields, "need"), partial(self._send_update, worker, server_slice, delta_number, reply)
        )

    def _send_update(self, worker: int, server_slice: ServerSlice, delta_number: int, reply: Reply) -> None:
        update, lent = server_slice.update(worker, delta_number)
        reply(update, server_slice if lent else None)

    def _level(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        self._slice(message.fields).publish_exact()
        reply(ActorMessage("level"), None)

    def _look(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        server_slice = self._slice(message.fields)
        reply(server_slice.read_state(whole(message.fields, "state") > 0), server_slice)

    def _spec(self, fields: Mapping[str, Any]) -> tuple[int, SliceSpec]:
        number = whole(fields, "slice")
        if number not in self._specs:
            raise MessageRefused(f"slice {number} is not of this shard")
        return number, self._specs[number]

    def _slice(self, fields: Mapping[str, Any]) -> ServerSlice:
        number, _ = self._spec(fields)
        if number not in self._slices:
            raise MessageRefused(f"slice {number} has no weights yet")
        return self._slices[number]

    def _all_slices(self) -> list[ServerSlice]:
        if len(self._slices) < len(self._specs):
            raise MessageRefused("some slices have no weights yet")
        return list(self._slices.values())


def whole(fields: Mapping[str, Any], name: str, least: int = 0) -> int:
    """The whole number `name`, from `least`. Raises `MessageRefused`."""
    value = fields.get(name)
    if type(value) is not int or not least <= value < 1 << 62:
        raise MessageRefused(f"{name}={value!r} is not a whole number from {least}")
    return value


def finite(fields: Mapping[str, Any], name: str) -> float:
    """The finite number `name`. Raises `MessageRefused`."""
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise MessageRefused(f"{name}={value!r} is not a finite number")
    return float(value)


def _check(tensor: Tensor, numel: int, dtype: torch.dtype) -> None:
    if tensor.numel() != numel or tensor.dtype != dtype:
        raise MessageRefused(f"{tensor.numel()} x {tensor.dtype} where {numel} x {dtype} is due")
