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

GONE = "gone"
"""The kind of an answer that says which workers are waited for in vain."""
ROUNDS_REMEMBERED = 2


class Shard:
    """The state of one shard.

    Args:
        lots: the slices of this shard, by their numbers.
    """

    def __init__(self, terms: ServerTerms, lots: Mapping[int, SliceSpec]) -> None:
        self._terms, self._lots = terms, lots
        self._keepers: dict[int, ServerSlice] = {}
        self._words: dict[int, dict[int, Tensor]] = {}
        self._listeners: dict[int, list[Reply]] = {}
        self._asking: list[tuple[int, Reply]] = []
        self._squares: dict[int, dict[str, list[float]]] = {}
        self._waiting: dict[int, Reply] = {}
        self._received = 0
        self._gone: set[int] = set()
        self._handlers = {
            "init": self._init, "push": self._join if terms.lockstep else self._add, "hear": self._hear,
            "norm": self._norm, "take": self._take, "pull": self._pull, "level": self._level, "look": self._look,
        }  # fmt: skip
        remembers = any(pays(lot.compress, lot.spans, lot.numel, lot.dtype) for lot in lots.values())
        remembers = remembers or (terms.compensate is not None and terms.compensate.looks_back)
        self._reads = {"look"} if remembers else {"look", "pull"}

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
        self._give_up()

    def lost(self, worker: int) -> None:
        """`worker` will say nothing more: in lockstep, who waits for it waits in vain."""
        self._gone.add(worker)
        self._give_up()

    def _answer(self, number: int, message: ActorMessage, keeper: ServerSlice | None) -> None:
        reply = self._waiting.pop(number, None)
        if reply is not None:
            reply(message, keeper)

    def _give_up(self) -> None:
        if self._gone and self._terms.lockstep:
            for number in list(self._waiting):
                self._answer(number, ActorMessage(GONE, {"workers": sorted(self._gone)}), None)

    def _init(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        number, lot = self._lot(message.fields)
        if number in self._keepers and self._keepers[number].begun:
            raise MessageRefused(f"slice {number} is in training already")
        places = message.fields.get("places")
        if not isinstance(places, list) or len(message.tensors) != 1 + len(places):
            raise MessageRefused("weights, and a tensor for each place, are due")
        _check(message.tensors[0], lot.numel, lot.dtype)
        weights, *state = message.tensors
        self._keepers[number] = ServerSlice(lot, self._terms, weights, places, state)
        reply(ActorMessage("kept"), None)

    def _join(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        keeper = self._keeper(message.fields)
        keeper.join(self._pushed(worker, keeper.lot, message), lambda: reply(ActorMessage("taken"), None))
        self._answer_norms()

    def _add(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        keeper = self._keeper(message.fields)
        groups = keeper.stepper.check(message.fields.get("groups"), len(self._terms.groups))
        kept = keeper.add(self._pushed(worker, keeper.lot, message), groups)
        reply(ActorMessage("taken" if kept else "dropped"), None)

    def _pushed(self, worker: int, lot: SliceSpec, message: ActorMessage) -> Push:
        fields = message.fields
        used = fields.get("used")
        if not isinstance(used, list) or len(used) != len(lot.spans) or not all(isinstance(u, bool) for u in used):
            raise MessageRefused(f"used={used!r}: a truth value for each of {len(lot.spans)} pieces is due")
        if len(message.tensors) != any(used):
            raise MessageRefused(f"{len(message.tensors)} tensors for used={used!r}")
        total = None
        if message.tensors:
            (said,) = message.tensors
            blank = lot.compress.blank(lot.spans, lot.numel, lot.dtype, torch.device("meta"))
            _check(said, blank.numel(), blank.dtype)
            total = lot.compress.decode(said, lot.spans, lot.numel, lot.dtype)
        return Push(worker, whole(fields, "number", 1), total, used, whole(fields, "version"), whole(fields, "tick"),
                    whole(fields, "count", 1), finite(fields, "scale"))  # fmt: skip

    def _hear(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        """What was heard of a round is remembered until no worker can ask for it again."""
        round_ = whole(message.fields, "round", 1)
        if len(message.tensors) != 1:
            raise MessageRefused(f"{len(message.tensors)} tensors; a control word is due")
        _check(message.tensors[0], self._terms.control, torch.float64)
        words = self._words.setdefault(round_, {})
        words[worker] = message.tensors[0].clone()
        self._words = {r: said for r, said in self._words.items() if r > round_ - ROUNDS_REMEMBERED}
        listeners = self._listeners.setdefault(round_, [])
        listeners.append(reply)
        if len(words) == self._terms.workers:
            heard = torch.stack([words[w] for w in sorted(words)]).sum(0)
            for each in self._listeners.pop(round_):
                each(ActorMessage("heard", {}, [heard]), None)
        self._listeners = {r: waiting for r, waiting in self._listeners.items() if r in self._words}

    def _norm(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        """Who asks first may be at the next round before others have asked, so norms are remembered as words are."""
        self._asking.append((whole(message.fields, "round", 1), reply))
        self._answer_norms()

    def _answer_norms(self) -> None:
        rounds = {keeper.together.round if keeper.together.complete else 0 for keeper in self._keepers.values()}
        for round_ in {r for r, _ in self._asking} - set(self._squares):
            if rounds <= {round_}:
                self._squares = {r: known for r, known in self._squares.items() if r > round_ - ROUNDS_REMEMBERED}
                self._squares[round_] = {str(number): keeper.squares() for number, keeper in self._keepers.items()}
        ready = [(r, reply) for r, reply in self._asking if r in self._squares]
        self._asking = [each for each in self._asking if each[0] not in self._squares]
        for r, reply in ready:
            reply(ActorMessage("norm", self._squares[r]), None)

    def _take(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        round_, scale = whole(message.fields, "round", 1), finite(message.fields, "scale")
        keepers = self._all_keepers()
        groups = keepers[0].stepper.check(message.fields.get("groups"), len(self._terms.groups)) if keepers else []
        for keeper in keepers:
            keeper.take(round_, scale, groups)
        reply(ActorMessage("taken"), None)

    def _pull(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        keeper, edition = self._keeper(message.fields), whole(message.fields, "edition")
        keeper.when(whole(message.fields, "need"), partial(self._send_news, worker, keeper, edition, reply))

    def _send_news(self, worker: int, keeper: ServerSlice, edition: int, reply: Reply) -> None:
        news, lent = keeper.news(worker, edition)
        reply(news, keeper if lent else None)

    def _level(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        self._keeper(message.fields).level()
        reply(ActorMessage("level"), None)

    def _look(self, worker: int, message: ActorMessage, reply: Reply) -> None:
        keeper = self._keeper(message.fields)
        reply(keeper.look(whole(message.fields, "state") > 0), keeper)

    def _lot(self, fields: Mapping[str, Any]) -> tuple[int, SliceSpec]:
        number = whole(fields, "slice")
        if number not in self._lots:
            raise MessageRefused(f"slice {number} is not of this shard")
        return number, self._lots[number]

    def _keeper(self, fields: Mapping[str, Any]) -> ServerSlice:
        number, _ = self._lot(fields)
        if number not in self._keepers:
            raise MessageRefused(f"slice {number} has no weights yet")
        return self._keepers[number]

    def _all_keepers(self) -> list[ServerSlice]:
        if len(self._keepers) < len(self._lots):
            raise MessageRefused("some slices have no weights yet")
        return list(self._keepers.values())


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
