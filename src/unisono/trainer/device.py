"""Chooses the device on which a worker trains, and the number of its threads."""

from __future__ import annotations

import os

import torch

from unisono.errors import InvalidInput


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of a worker: a GPU for this worker alone, or the CPU if `wanted` is ``cpu`` or GPUs are too few.

    Raises:
        InvalidInput: `wanted` is ``cuda``, and this host has no GPU for this worker.
    """
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cuda" and count <= local_rank:
        raise InvalidInput("device", wanted, f"worker {local_rank} of this host needs a CUDA device of its own, and "
                           f"this host has {count}", "start fewer workers, or use device cpu")  # fmt: skip
    if count <= local_rank:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def fair_threads(local_size: int) -> int:
    """The number of threads per worker: the cores that this process may use, divided among the workers of this host.

    It is at least 1.
    """
    return max(1, len(os.sched_getaffinity(0)) // local_size)
