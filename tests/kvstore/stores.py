"""Stores of every type on simulated workers, and what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.trainer.small_loops import world_of
from unisono.comm import Communicator, simulate
from unisono.kvstore import KVStore, create
from unisono.kvstore.store_types import TYPES

DISTRIBUTED = [name for name, kind in TYPES.items() if kind.distributed]
SYNCHRONOUS = [name for name, kind in TYPES.items() if kind.synchronous]
CELLS = [(name, size) for name in TYPES for size in ((1, 2, 3) if name in DISTRIBUTED else (1,))]
"""Every type, on the numbers of workers that it can have."""
SYNCHRONOUS_CELLS = [cell for cell in CELLS if cell[0] in SYNCHRONOUS]
SHAPE = (5, 3)


def on_workers(name: str, size: int, work: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """What ``work(kv, *args)`` returns on each simulated worker."""
    return simulate(size, with_store, name, work, args, options)


def with_store(
    comm: Communicator, name: str, work: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    with create(name, world=world_of(comm), **options) as kv:
        assert (kv.type, kv.rank, kv.num_workers) == (name, comm.rank, comm.size)
        return work(kv, *args)


def normal(*seed: int, shape: tuple[int, ...] = SHAPE, dtype: Any = np.float32) -> np.ndarray:
    """Random numbers that are the same for the same seed."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def gradients(worker: int, step: int, devices: int = 1, shape: tuple[int, ...] = SHAPE) -> list[np.ndarray]:
    """What the devices of `worker` push at `step`."""
    return [normal(1, worker, step, device, shape=shape) for device in range(devices)]


def pulled(kv: KVStore, key: Any, shape: tuple[int, ...] = SHAPE, dtype: Any = np.float32) -> np.ndarray:
    out = np.full(shape, 7, dtype)
    kv.pull(key, out=out)
    return out


def as_torch(arrays: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(x.copy()) for x in arrays]
