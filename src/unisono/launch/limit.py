"""How many workers one host is asked for at most: a misspelt number, or a hostile one, shall not bring it to a stop."""

from __future__ import annotations

import os

from unisono.errors import InvalidInput

PER_PROCESSOR = 64


def check_count(workers: int, field: str = "workers") -> None:
    """Raise `InvalidInput`, which names `field`, if more workers are to be started here than 64 for each processor that
    this process may use. Nothing has been started or created before."""
    processors = len(os.sched_getaffinity(0))
    if workers > PER_PROCESSOR * processors:
        raise InvalidInput(
            field, workers, f"this process may use {processors} processor{'s' * (processors != 1)}, and starts at most "
            f"{PER_PROCESSOR} workers for each", "start fewer here, and others on other hosts with unisono join"
        )  # fmt: skip
