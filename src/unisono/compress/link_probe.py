"""Measures the link with messages of growing size, by the clock of the communicator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.compress.compressor import CollectiveVerbs

_SMALL = 4 << 10  # bytes of a message whose time is almost only latency
_LONG_SECONDS = 0.1  # a message that takes so long measures the rate, even if the link allows bursts
_GROWTH = 8


def slowest(numbers: Sequence[float], comm: CollectiveVerbs, device: torch.device) -> list[float]:
    """Collective: the elementwise maximum of all workers' `numbers`."""
    rows: Tensor = comm.gather(torch.tensor(numbers, dtype=torch.float64, device=device)).wait()
    largest: list[float] = rows.amax(0).tolist()
    return largest


def probe(verb: str, largest: int, comm: CollectiveVerbs, device: torch.device) -> list[tuple[int, float]]:
    """Collective: measure ``(bytes, seconds)`` of messages of growing size, up to `largest` or `_LONG_SECONDS`."""
    size = min(_SMALL, largest)
    points = [(size, _seconds(verb, size, 5, comm, device))]
    while size < largest and points[-1][1] < _LONG_SECONDS:
        size = min(size * _GROWTH, largest)
        points.append((size, _seconds(verb, size, 2, comm, device)))
    return points


def _seconds(verb: str, size: int, times: int, comm: CollectiveVerbs, device: torch.device) -> float:
    """The time of a message of `size` bytes on the slowest worker, as the least of `times` measurements."""
    taken = []
    for _ in range(times):
        x = torch.zeros(-(-size // 4), device=device)
        pieces = list(x.tensor_split(comm.size))
        comm.gather(torch.zeros(1, device=device)).wait()  # a barrier, so that all workers start together
        start = comm.now()
        if verb == "sum":
            comm.sum(x).wait()
        elif verb == "gather":
            comm.gather(x).wait()
        else:
            comm.exchange(pieces, [pieces[comm.rank]] * comm.size).wait()
        taken.append(comm.now() - start)
    return slowest([min(taken)], comm, device)[0]
