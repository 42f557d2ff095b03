"""Which rank holds the memory checkpoint of which other rank: arithmetic without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def buddies(hosts: Sequence[str]) -> list[int]:
    """The buddy of each rank: a permutation without fixed points, on another host for as many ranks as possible.

    Ranks are ordered by host, in a circle. The buddy is as many ranks further as the largest host has. Where no host
    has more than half of all ranks, that is always another host; otherwise, ranks without a buddy on another host are
    as few as can be. A single rank is its own buddy.

    Args:
        hosts: the host of each rank.
    """
    circle = sorted(range(len(hosts)), key=lambda rank: (hosts.index(hosts[rank]), rank))
    largest = max(Counter(hosts).values())
    step = largest if largest < len(circle) else 1
    return [circle[(circle.index(rank) + step) % len(circle)] for rank in range(len(circle))]
