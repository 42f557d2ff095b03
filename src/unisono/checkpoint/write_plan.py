"""Who writes what: arithmetic without I/O."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item", bound=Hashable)


def plan_replicated_writes(sizes: Mapping[str, int], workers: int) -> list[list[str]]:
    """The names that each worker writes where everybody has everything, balanced by bytes; see `plan_writes`.

    Args:
        sizes: bytes of each tensor.
        workers: how many write, at least 1.

    Raises:
        ValueError: `workers` is below 1.
    """
    if workers < 1:
        raise ValueError(f"workers={workers!r} is below 1")
    return plan_writes(sizes, dict.fromkeys(sizes, tuple(range(workers))), workers)


def plan_writes(sizes: Mapping[Item, int], holders: Mapping[Item, Sequence[int]], workers: int) -> list[list[Item]]:
    """What each worker writes, balanced by bytes; the same on every worker for the same arguments.

    What one worker alone holds is its own to write. Of the rest, largest first, each goes to that of its holders with
    the least so far (Graham 1969, LPT: where all hold everything, no worker gets more than 4/3 of the best possible
    maximum). Ties go by item and by rank. Every item is in exactly one list; a list is sorted and may be empty.

    Args:
        sizes: bytes of each item.
        holders: the workers that have it, in order.
        workers: how many there are.
    """
    shares: list[list[Item]] = [[] for _ in range(workers)]
    loads = [0] * workers
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    order: Any = lambda item: (len(holders[item]) > 1, -sizes[item], item)
    for item in sorted(sizes, key=order):
        who = tuple(holders[item])
        if len(who) == 1:
            rank = who[0]
        else:
            rank = _least(heaps.setdefault(who, [(0, rank) for rank in who]), loads)
        shares[rank].append(item)
        loads[rank] += sizes[item]
    return [sorted(share) for share in shares]  # type: ignore[type-var]


def _least(heap: list[tuple[int, int]], loads: Sequence[int]) -> int:
    """The rank with the least so far. What the heap says of others may be old: too little, never too much."""
    while heap[0][0] != loads[heap[0][1]]:
        heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
    return heap[0][1]
