"""Who keeps whose copy: arithmetic without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def buddies(hosts: Sequence[str]) -> list[int]:
    """Who keeps the copy of each worker's state: each keeps one, nobody their own unless alone, and as few as possible
    that of a worker of the same host.

    Workers are put in a row, host by host, and look as far along it, and around, as the largest host is long. Where no
    host has more than half of all, that leads to another one; else only those find none for whom there is no room.

    Args:
        hosts: where each worker is.
    """
    row = sorted(range(len(hosts)), key=lambda rank: (hosts.index(hosts[rank]), rank))
    largest = max(Counter(hosts).values())
    step = largest if largest < len(row) else 1
    return [row[(row.index(rank) + step) % len(row)] for rank in range(len(row))]
