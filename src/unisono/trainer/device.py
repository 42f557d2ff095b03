"""Chooses the device that a worker trains on, and the number of its threads."""

from __future__ import annotations

import os

import torch

from unisono.errors import InvalidInput


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of a worker: a GPU for it alone, or the CPU if `wanted` or if there are too few GPUs.

    Raises:
        InvalidInput: `wanted` is ``cuda``, and this host has no GPU for this worker.
    """
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cuda" and count <= local_rank:
        raise InvalidInput("device", wanted, f"this host has {count} CUDA devices for worker {local_rank} on it",
                           "start fewer workers, or use device cpu")  # fmt: skip
    if count <= local_rank:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def fair_threads(local_size: int) -> int:
    """Threads per worker: the cores that this process may use, divided among the workers of this host; at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // local_size)
