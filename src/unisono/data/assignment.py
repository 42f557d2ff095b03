"""Assigns contiguous ranges of micro-batches to workers, in proportion to given weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

from unisono.errors import InvalidInput


def assign(micro_batches: int, shares: Sequence[float]) -> list[range]:
    """Contiguous ranges of ``range(micro_batches)``, one per worker, in proportion to `shares`.

    Divides by largest remainder, with ties to the lower rank. Every worker with a positive share gets at least one
    micro-batch.

    Raises:
        InvalidInput: there are more workers with a positive share than micro-batches.
        ValueError: a share is negative or not finite, or no share is positive.
    """
    if not all(math.isfinite(share) and share >= 0 for share in shares) or not sum(shares) > 0:
        raise ValueError(f"shares={list(shares)}: they must be finite and 0 or more, one of them above 0")
    active = [worker for worker, share in enumerate(shares) if share > 0]
    check_enough(micro_batches, len(active))
    counts = _largest_remainder(micro_batches, shares)
    ends = [sum(counts[: worker + 1]) for worker in range(len(shares))]
    return [range(end - count, end) for count, end in zip(counts, ends)]


def _largest_remainder(total: int, shares: Sequence[float]) -> list[int]:
    """Integers with sum `total`: quotas rounded down, but at least 1, and the rest by remainder."""
    whole = sum(shares)
    quotas = [total * (share / whole) for share in shares]
    counts = [max(1, math.floor(quota)) if share > 0 else 0 for quota, share in zip(quotas, shares)]
    while sum(counts) != total:
        change = 1 if sum(counts) < total else -1
        movable = [w for w, share in enumerate(shares) if share > 0 and (change > 0 or counts[w] > 1)]
        chosen = max(movable, key=lambda worker: (change * (quotas[worker] - counts[worker]), -worker))
        counts[chosen] += change
    return counts


def check_enough(micro_batches: int, workers: int) -> None:
    """Raise `InvalidInput` if there are fewer micro-batches than workers."""
    if workers > micro_batches:
        raise InvalidInput(
            "workers",
            workers,
            f"a step has only {micro_batches} micro-batch{'es' * (micro_batches != 1)}, each worker needs one",
            f"use at most {micro_batches} worker{'s' * (micro_batches != 1)}, or at least {workers} micro-batches: "
            "a smaller micro_batch or a larger global_batch",
        )
