"""Exchange of texts of any length between all workers."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.work import Work

Steps = Generator[Work[Any], Any, list[str]]


def gather_text(comm: Communicator, text: str) -> list[str]:
    """Collective: the `text` of every worker, by rank."""
    steps = gather_text_steps(comm, text)
    work = next(steps)
    while True:
        try:
            work = steps.send(work.wait())
        except StopIteration as stop:
            texts: list[str] = stop.value
            return texts


def gather_text_steps(comm: Communicator, text: str) -> Steps:
    """`gather_text` as a generator, for a caller that does not want to wait.

    The generator yields operations. The caller sends the result of each into the generator, which returns the texts.
    """
    data = text.encode()
    lengths = (yield comm.gather(torch.tensor([len(data)]))).view(-1).tolist()
    row = torch.zeros(max(1, *lengths), dtype=torch.uint8)
    if data:
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = yield comm.gather(row)
    return [bytes(row.numpy()[:length]).decode() for row, length in zip(rows, lengths)]


def broadcast_text(comm: Communicator, text: str) -> str:
    """Collective: the `text` of worker 0, on all workers."""
    data = text.encode()
    length = comm.broadcast(torch.tensor([len(data)])).wait()
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if comm.rank == 0 and data else None
    received = torch.empty(int(length), dtype=torch.uint8) if own is None else own
    return bytes(comm.broadcast(received).wait().numpy()).decode()
