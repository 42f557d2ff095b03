"""Texts that all workers tell all."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from unisono.checkpoint.fingerprint import raw_bytes
from unisono.comm import Communicator, Work

Telling = Generator[Work[Any], Any, list[str]]


def tell(comm: Communicator, text: str) -> list[str]:
    """Everybody's `text`, by rank."""
    steps = telling(comm, text)
    work = next(steps)
    while True:
        try:
            work = steps.send(work.wait())
        except StopIteration as stop:
            found: list[str] = stop.value
            return found


def telling(comm: Communicator, text: str) -> Telling:
    """The same for those who do not wait: each work's result is to be sent in."""
    data = text.encode()
    lengths = (yield comm.gather(torch.tensor([len(data)]))).view(-1).tolist()
    mine = torch.zeros(max(1, *lengths), dtype=torch.uint8)
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = yield comm.gather(mine)
    return [bytes(raw_bytes(row)[:length]).decode() for row, length in zip(rows, lengths)]
