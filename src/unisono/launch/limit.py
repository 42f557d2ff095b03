"""Limits the number of workers on one host, so that a misspelt number does not overload it."""

from __future__ import annotations

import os

from unisono.errors import InvalidInput

MAX_PER_PROCESSOR = 64


def check_worker_count(workers: int, field: str = "workers") -> None:
    """Raise `InvalidInput` for `field` if `workers` are more than 64 for each processor that this process may use.

    Callers call it before they start or create anything.
    """
    processors = len(os.sched_getaffinity(0))
    if workers > MAX_PER_PROCESSOR * processors:
        raise InvalidInput(
            field, workers, f"this process may use {processors} processor{'s' * (processors != 1)}, and starts at most "
            f"{MAX_PER_PROCESSOR} workers for each", "start fewer here, and more on other hosts with unisono join"
        )  # fmt: skip
