"""Actors for tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from unisono.comm import ActorConnection, ActorMessage, Answer


class Echo:
    """Answers with what it is sent; knows some more words."""

    def __init__(self, number: int = 0, config: Mapping[str, Any] | None = None) -> None:
        self.number, self.config = number, dict(config or {})
        self.largest_bytes = self.config.get("largest_bytes", 1 << 30)
        self.lines: Sequence[ActorConnection] = ()
        self.gone: set[int] = set()
        self.waiting: list[Answer] = []
        self.watching: list[Answer] = []
        self.total = torch.zeros(0)

    def connected(self, lines: Sequence[ActorConnection]) -> None:
        self.lines = lines

    def receive(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        handle: Callable[[int, ActorMessage, Answer], None] = getattr(self, message.kind)
        handle(sender, message, answer)

    def lost(self, sender: int) -> None:
        self.gone.add(sender)
        for answer in self.watching:
            answer(ActorMessage("gone", {"senders": sorted(self.gone)}))
        self.watching.clear()

    def echo(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        answer(ActorMessage("echo", {**message.fields, "sender": sender, "number": self.number}, message.tensors))

    def barrier(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """Answers when all have called."""
        self.waiting.append(answer)
        if len(self.waiting) == message.fields["size"]:
            for each in self.waiting:
                each(ActorMessage("go", {"number": self.number}))
            self.waiting.clear()

    def add(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """Answers with the sum of all that it was sent."""
        (x,) = message.tensors
        if self.total.numel() != x.numel():
            self.total = torch.zeros_like(x)
        self.total += x
        answer(ActorMessage("sum", {}, [self.total]))

    def value(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        answer(ActorMessage("value", {"gone": sorted(self.gone)}, [self.total]))

    def watch(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """Answers when a client is lost."""
        if self.gone:
            answer(ActorMessage("gone", {"senders": sorted(self.gone)}))
        else:
            self.watching.append(answer)

    def forward(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """Has a colleague echo it."""
        after = message.fields["to"]

        def then(said: ActorMessage | None) -> None:
            if said is None:
                answer(ActorMessage("not there", {"to": after}))
            else:
                answer(ActorMessage("forwarded", said.fields, said.tensors))

        self.lines[after].send(ActorMessage("echo", {"by": self.number}, message.tensors), then)

    def silent(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        """Never answers."""

    def fail(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        raise ValueError("as it was asked to")

    def process(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        answer(ActorMessage("process", {"pid": os.getpid(), "threads": torch.get_num_threads(), "config": self.config}))

    def draw(self, sender: int, message: ActorMessage, answer: Answer) -> None:
        answer(ActorMessage("drawn", {"number": float(torch.rand(1))}))


def draws(number: int, config: Mapping[str, Any]) -> Echo:
    """An actor that needs random numbers from the beginning."""
    torch.rand(3)
    return Echo(number, config)
