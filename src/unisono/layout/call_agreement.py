"""Checks, before the first forward pass, that all ranks found the same calls of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from unisono.errors import InvalidInput
from unisono.layout.block_calls import BlockCalls

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_all(mine: Tensor, group: dist.ProcessGroup) -> Tensor | None:
    """Collective: the tensors `mine` of all ranks of `group`, (ranks, *shape of `mine`); None for fake tensors."""
    size = dist.get_world_size(group)
    rows_of_all = mine.repeat(size, *[1] * (mine.dim() - 1))  # the result in a fake group
    _all_gather(rows_of_all, mine, group=group)
    return None if isinstance(rows_of_all, FakeTensor) else rows_of_all.view(size, *mine.shape)


def check_calls(
    found: BlockCalls,
    names: Mapping[nn.Module, str],
    layout: str,
    groups: Iterable[dist.ProcessGroup],
    device: torch.device,
) -> None:
    """Collective over `groups`: check that their ranks found the same calls of the same blocks.

    Raises:
        InvalidInput: the ranks found different calls, and would wait for each other for ever; names a block and two
            workers.
    """
    blocks = sorted(found.order, key=names.__getitem__)
    rows = [
        (found.order.index(block), found.may_vary or block in found.called, block in found.used_outside, found.may_vary)
        for block in blocks
    ]
    if not rows:
        return
    mine = torch.tensor(rows, device=device, dtype=torch.int64)
    for group in groups:
        rows_of_all = gather_all(mine, group)
        if rows_of_all is None or (rows_of_all == rows_of_all[0]).all():
            continue
        worker, block, _ = (rows_of_all != rows_of_all[0]).nonzero()[0].tolist()
        first, other = (dist.get_global_rank(group, rank) for rank in (0, worker))
        name = names[blocks[block]]
        problem = f"{name} is called differently by workers {first} and {other} on their first samples"
        cure = "let all workers call the same blocks in the same order, or omit the layout"
        raise InvalidInput("layout", layout, f"{problem}, and they gather its parameters together", cure)
