"""Which rank writes which tensor: arithmetic without I/O."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item", bound=Hashable)


def plan_replicated_writes(sizes: Mapping[str, int], workers: int) -> list[list[str]]:
    """The names of the tensors that each rank writes, balanced by bytes, if all ranks have all of them.

    See `plan_writes`.

    Args:
        sizes: the bytes of each tensor, by name.
        workers: the number of ranks that write, at least 1.

    Raises:
        ValueError: `workers` is below 1.
    """
    if workers < 1:
        raise ValueError(f"workers={workers!r} is below 1")
    return plan_writes(sizes, dict.fromkeys(sizes, tuple(range(workers))), workers)


def plan_writes(sizes: Mapping[Item, int], holders: Mapping[Item, Sequence[int]], workers: int) -> list[list[Item]]:
    """The items that each rank writes, balanced by bytes; equal on all ranks for equal arguments.

    An item with a single holder is written by that rank. Each other item, largest first, goes to the holder with the
    fewest bytes so far (Graham 1969, LPT: if all ranks hold all items, no rank gets more than 4/3 of the optimal
    maximum). Ties are broken by item and by rank. Every item is in exactly one list; a list is sorted and may be empty.

    Args:
        sizes: the bytes of each item.
        holders: for each item, the ranks that have it, in order.
        workers: the number of ranks.
    """
    items: list[list[Item]] = [[] for _ in range(workers)]
    loads = [0] * workers
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    order: Any = lambda item: (len(holders[item]) > 1, -sizes[item], item)
    for item in sorted(sizes, key=order):
        ranks = tuple(holders[item])
        if len(ranks) == 1:
            rank = ranks[0]
        else:
            rank = _least_loaded(heaps.setdefault(ranks, [(0, rank) for rank in ranks]), loads)
        items[rank].append(item)
        loads[rank] += sizes[item]
    return [sorted(each) for each in items]  # type: ignore[type-var]


def _least_loaded(heap: list[tuple[int, int]], loads: Sequence[int]) -> int:
    """The rank with the smallest load. Entries of the heap may be out of date: too small, never too large."""
    while heap[0][0] != loads[heap[0][1]]:
        heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
    return heap[0][1]
