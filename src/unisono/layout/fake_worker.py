"""A worker among others who are not there: one process that lays a model out as if it were any of them.

Groups are torch's fake ones, in which all messages arrive at once with nothing in them, and tensors are torch's fake
ones, which know their device and shape and have no memory.
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
    """What an imagined worker holds.

    Args:
        held: as a real one's, but for the numbers.
        shapes: a context in which tensors are made without memory.
        of: what the like of a real batch is there.
        device: where its tensors are, or are said to be.
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
    """Worker `rank` of `places`; there must be no default process group.

    Args:
        compute: how the model computes, block by block.
        memory: whether tensors have memory after all, with zeros in it: for a model whose code looks at numbers.

    Raises:
        InvalidInput: as `lay`.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # by which torch knows of fake groups

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=places.workers)
    try:
        mesh = device_mesh(places, device.type)
        # What a batch weighs may be a matter of its numbers, and nothing that is counted depends on it.
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
        return mode.from_tensor(value)  # which knows how much memory lies behind a view
    with mode:
        return torch.empty_like(value, device=device)
