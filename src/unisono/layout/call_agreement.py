"""What workers have to do alike in a forward pass, compared between them before the first one."""

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
    """Collective: what all workers of `group` have, (workers, *shape of `mine`); None where no numbers travel."""
    size = dist.get_world_size(group)
    everybody = mine.repeat(size, *[1] * (mine.dim() - 1))  # as groups without others leave it
    _all_gather(everybody, mine, group=group)
    return None if isinstance(everybody, FakeTensor) else everybody.view(size, *mine.shape)


def check_calls(
    found: BlockCalls,
    names: Mapping[nn.Module, str],
    layout: str,
    groups: Iterable[dist.ProcessGroup],
    device: torch.device,
) -> None:
    """Collective over `groups`: their workers found the same calls of the same blocks.

    Raises:
        InvalidInput: they did not, so that they would wait for each other for ever; names a block, and the workers.
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
        everybody = gather_all(mine, group)
        if everybody is None or (everybody == everybody[0]).all():
            continue
        worker, block, _ = (everybody != everybody[0]).nonzero()[0].tolist()
        first, other = (dist.get_global_rank(group, rank) for rank in (0, worker))
        name = names[blocks[block]]
        problem = f"{name} is not called alike by workers {first} and {other} on their first samples"
        cure = "let all workers call the same blocks in the same order, or leave the layout out"
        raise InvalidInput("layout", layout, f"{problem}, and they gather its parameters together", cure)
