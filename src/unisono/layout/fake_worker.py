"""One worker's part of a layout in a single process, without the other workers.

Process groups are torch's fake ones, whose collectives complete at once without data. Tensors are torch's fake ones,
which have a device and a shape but no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unisono.layout.local_model import LocalModel
from unisono.layout.parallelize import device_mesh, parallelize_fake
from unisono.layout.rank_mesh import RankMesh
from unisono.layout.repeated_blocks import BlockOptions
from unisono.layout.sample_batch import Sample
from unisono.tensors.batch import mapped


@dataclass(frozen=True)
class FakeWorker:
    """One worker's part of a model, without memory.

    Args:
        held: the local model, which lacks only the values of a real worker's model.
        shapes: returns a context in which tensors are made as this worker's are: without memory, unless it was asked
            for.
        of: converts a real batch to tensors of this worker.
        device: the device that these tensors are on, or report to be on.
    """

    held: LocalModel
    shapes: Callable[[], AbstractContextManager[Any]]
    of: Callable[[Any], Any]
    device: torch.device


@contextmanager
def fake_worker(
    build: Callable[[], nn.Module],
    places: RankMesh,
    rank: int,
    sample: Sample,
    device: torch.device,
    compute: BlockOptions,
    memory: bool,
) -> Iterator[FakeWorker]:
    """A context with the worker `rank` of `places`. The process must have no default process group.

    Args:
        compute: how the blocks compute.
        memory: whether tensors have memory after all, filled with zeros, for a model whose code reads values.

    Raises:
        InvalidInput: as `parallelize`.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # its import registers the fake backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=places.workers)
    try:
        mesh = device_mesh(places, device.type)
        # The weight may depend on values, which fake tensors lack. No estimate depends on it.
        sample = replace(sample, weight=None)
        mode = None if memory else FakeTensorMode(allow_non_fake_inputs=True)
        shapes = (lambda: mode) if mode else nullcontext
        held = parallelize_fake(build, places.layout, mesh, sample, compute, shapes)
        yield FakeWorker(held, shapes, partial(mapped, lambda x: _like(x, mode, device)), device)
    finally:
        dist.destroy_process_group()


def _like(value: Tensor, mode: FakeTensorMode | None, device: torch.device) -> Tensor:
    if mode is None:
        return value.to(device)
    if value.device.type == device.type:
        return mode.from_tensor(value)  # keeps the storage size behind a view
    with mode:
        return torch.empty_like(value, device=device)
