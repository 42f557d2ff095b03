"""Which rank holds the memory checkpoint of which other rank: arithmetic without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def buddies(hosts: Sequence[str]) -> list[int]:
    """The buddy of each rank: a permutation without fixed points, on another host for as many ranks as possible.

    Ranks are ordered by host, in a circle. If the largest host has s ranks, the buddy of a rank is s places further on.
    If no host has more than half of all ranks, every buddy is on another host. Otherwise, as few ranks as possible have
    a buddy on their own host. A single rank is its own buddy.

    Args:
        hosts: the host of each rank.
    """
    circle = sorted(range(len(hosts)), key=lambda rank: (hosts.index(hosts[rank]), rank))
    largest = max(Counter(hosts).values())
    step = largest if largest < len(circle) else 1
    return [circle[(circle.index(rank) + step) % len(circle)] for rank in range(len(circle))]
