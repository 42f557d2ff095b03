"""Random streams, one per micro-batch, independent of the worker that computes it.

Seeding affects the process: it sets torch's default generators and Python's, and stores nothing else.
"""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import torch


def mix(*words: int) -> int:
    """A 64-bit hash of integers, equal on every machine and in every version of Python."""
    packed = b"".join(struct.pack("<Bq", 0, word) if -(2**63) <= word < 2**63 else _long(word) for word in words)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def stream(seed: int, step: int, micro_batch: int, purpose: str) -> int:
    """The 63-bit seed of one micro-batch for one purpose (``compute``, ``load``, ``init``…)."""
    return mix(seed, step, micro_batch, int.from_bytes(purpose.encode(), "little")) >> 1


def seed_compute(value: int) -> None:
    """Seed the generators of forward passes: torch's (CUDA's if it is in use) and Python's.

    Args:
        value: 0 to ``2**63 - 1``, from `stream`.
    """
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    random.seed(value)


def seed_load(value: int) -> None:
    """Seed the generators of datasets: those of `seed_compute`, and numpy's legacy generator."""
    seed_compute(value)
    np.random.seed(np.array([value & 0xFFFFFFFF, value >> 32], dtype=np.uint32))


def _long(word: int) -> bytes:
    size = (word.bit_length() + 8) // 8
    return struct.pack("<BI", 1, size) + word.to_bytes(size, "little", signed=True)
