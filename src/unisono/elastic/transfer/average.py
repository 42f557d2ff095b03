"""What several have, each its own, becomes one that all have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from unisono.checkpoint.ownership import ShardMap
from unisono.comm import Communicator


def differing(digests: Sequence[Mapping[str, str]]) -> list[str]:
    """The names under which not all workers have the same, given each one's digests by name."""
    first, *others = digests
    return [name for name, digest in first.items() if any(other.get(name) != digest for other in others)]


def mean_of(
    comm: Communicator, here: Mapping[str, Tensor], wanted: ShardMap, sources: Sequence[int]
) -> dict[str, Tensor]:
    """The mean of what `sources` have under each name of `wanted`, in CPU memory; of whole numbers, what the first of
    them has. All call it alike, those who have none of it too, and get the same bits.

    Args:
        here: what this worker has, if it is one of `sources`.

    Raises:
        PeerLost: a worker was lost meanwhile.
    """
    return {name: _mean(comm, here.get(name), wanted[name].dtype, wanted[name].box.size, sources)
            for name in sorted(wanted)}  # fmt: skip


def mean(found: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of what each of `found` has under a name, all of them under the same ones; of whole numbers, what the
    first has. One is held at a time; empty where there is none."""
    total, dtypes, count = dict[str, Tensor](), dict[str, torch.dtype](), 0
    for count, each in enumerate(found, 1):
        for name, tensor in each.items():
            if count == 1:
                dtypes[name], total[name] = tensor.dtype, tensor.to(_wide(tensor.dtype), copy=True)
            elif tensor.is_floating_point():
                total[name].add_(tensor)
    return {n: (x / count).to(dtypes[n]) if x.is_floating_point() else x for n, x in total.items()}


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Where sums of such numbers are taken."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _mean(
    comm: Communicator, here: Tensor | None, dtype: torch.dtype, size: Sequence[int], sources: Sequence[int]
) -> Tensor:
    wide = _wide(dtype)
    mine = torch.zeros(size, dtype=wide) if here is None else here.detach().to("cpu", wide, copy=True)
    flat = mine.view(-1)
    if dtype.is_floating_point:
        return (comm.sum(flat).wait() / len(sources)).to(dtype).view(mine.shape)
    return comm.broadcast(flat, sources[0]).wait().view(mine.shape)
