"""Connects a test process to the other ranks of its group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.comm import connect


def connected(
    rank: int,
    size: int,
    kind: str,
    url: str,
    timeout_seconds: float,
    law: Callable[..., Any],
    *args: Any,
) -> Any:
    comm = connect(rank, size, rendezvous=url, local_size=size, kind=kind, timeout_seconds=timeout_seconds)
    try:
        assert type(comm).__name__ == {"gloo": "TorchGroup", "shared_memory": "SharedMemory"}[kind]
        return law(comm, *args)
    finally:
        comm.close()
        comm.close()
