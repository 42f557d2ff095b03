"""Costs of messages on links, as closed forms for the simulated communicator and for estimates.

All times are seconds, all sizes bytes. Links are full duplex; a worker's link carries one message at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONTENTION = 1.3
"""The time of several messages that share a link in one direction, relative to one message of as many bytes: TCP
streams do not share evenly, and the last one decides. Measured for 4 hosts that all send to all: 1.25 to 1.5 at 25
Mbit/s, 1.15 to 1.3 at 100 Mbit/s, where a ring takes 1.05 to 1.15 (``python -m benchmarks links``)."""


@dataclass(frozen=True)
class Link:
    """The network link of one worker: its rate in each direction, and the time of an empty message."""

    bytes_per_second: float = 1.25e9
    latency_seconds: float = 50e-6

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0 or not 0 <= self.latency_seconds < math.inf:
            raise ValueError(f"{self}: bytes_per_second must be above 0, latency_seconds finite and not below 0")

    def seconds(self, size_bytes: float) -> float:
        """The time of one message of `size_bytes`."""
        return self.latency_seconds + size_bytes / self.bytes_per_second


def sum_seconds(links: Sequence[Link], size_bytes: float) -> float:
    """The time of a ring all-reduce: ``2(n-1)`` rounds of a message of ``size/n``, each as slow as the slowest link
    (Patarasu & Yuan 2009, "Bandwidth optimal all-reduce algorithms")."""
    n = len(links)
    return 2 * (n - 1) * _slowest(links, size_bytes / n)


def gather_seconds(links: Sequence[Link], size_bytes: float) -> float:
    """The time of a ring all-gather: ``n-1`` rounds of a message of `size_bytes`, the size of each worker's input."""
    return (len(links) - 1) * _slowest(links, size_bytes)


def broadcast_seconds(links: Sequence[Link], size_bytes: float) -> float:
    """The time of a broadcast in a binomial tree: ``ceil(log2 n)`` rounds of the whole message."""
    return math.ceil(math.log2(len(links))) * _slowest(links, size_bytes)


def exchange_seconds(links: Mapping[int, Link], sizes_bytes: Mapping[tuple[int, int], float]) -> float:
    """The time of messages of ``sizes_bytes[sender, receiver]`` between pairs, all at once: the busiest link decides.

    If a link carries several messages in one direction, their size is multiplied by `CONTENTION`. What a worker sends
    to itself takes no time.
    """
    loads: dict[tuple[str, int], list[float]] = {}
    for (sender, receiver), size in sizes_bytes.items():
        if sender != receiver:
            loads.setdefault(("sends", sender), []).append(size)
            loads.setdefault(("receives", receiver), []).append(size)
    return max((_shared(links[rank], sizes) for (_, rank), sizes in loads.items()), default=0.0)


def sum_bytes(workers: int, size_bytes: int) -> int:
    """The bytes that each worker sends in a ring all-reduce."""
    return 2 * (workers - 1) * size_bytes // workers


def _slowest(links: Sequence[Link], size_bytes: float) -> float:
    return max(link.seconds(size_bytes) for link in set(links))


def _shared(link: Link, sizes_bytes: Sequence[float]) -> float:
    return link.seconds(sum(sizes_bytes) * (CONTENTION if len(sizes_bytes) > 1 else 1.0))
