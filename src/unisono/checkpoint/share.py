"""Who writes what: arithmetic without I/O."""

from __future__ import annotations

import heapq
from collections.abc import Mapping


def share_out(sizes: Mapping[str, int], workers: int) -> list[list[str]]:
    """The names that each worker writes, balanced by bytes; the same on every worker for the same sizes.

    Largest first, each to the worker with the least so far (Graham 1969, LPT: no worker gets more than 4/3
    of the best possible maximum). Ties go by name and by rank. Every name is in exactly one list; a list is
    sorted and may be empty.

    Args:
        sizes: bytes of each tensor.
        workers: how many write, at least 1.

    Raises:
        ValueError: `workers` is below 1.
    """
    if workers < 1:
        raise ValueError(f"workers={workers!r} is below 1")
    shares: list[list[str]] = [[] for _ in range(workers)]
    loads = [(0, rank) for rank in range(workers)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = loads[0]
        shares[rank].append(name)
        heapq.heapreplace(loads, (load + sizes[name], rank))
    return [sorted(share) for share in shares]
