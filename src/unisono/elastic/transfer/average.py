"""Averages state that differs between workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from unisono.checkpoint.ownership import ShardMap
from unisono.comm import Communicator


def differing(digests: Sequence[Mapping[str, str]]) -> list[str]:
    """The names whose digests, given per worker, are not the same on all workers."""
    first, *others = digests
    return [name for name, digest in first.items() if any(other.get(name) != digest for other in others)]


def mean_of(
    comm: Communicator, here: Mapping[str, Tensor], wanted: ShardMap, sources: Sequence[int]
) -> dict[str, Tensor]:
    """Collective: the mean over `sources` of each tensor in `wanted`, in CPU memory, with the same bits on all ranks.

    Integer tensors are not averaged: the value of the first source is taken.

    Args:
        here: this rank's tensors, if it is one of `sources`.

    Raises:
        PeerLost: a worker was lost meanwhile.
    """
    return {name: _mean(comm, here.get(name), wanted[name].dtype, wanted[name].box.size, sources)
            for name in sorted(wanted)}  # fmt: skip


def mean(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of `states`, which have the same names; empty if there are no states.

    Integer tensors are not averaged: the value in the first state is taken. One state at a time is in memory.
    """
    total, dtypes, count = dict[str, Tensor](), dict[str, torch.dtype](), 0
    for count, state in enumerate(states, 1):
        for name, tensor in state.items():
            if count == 1:
                dtypes[name], total[name] = tensor.dtype, tensor.to(_wide(tensor.dtype), copy=True)
            elif tensor.is_floating_point():
                total[name].add_(tensor)
    return {n: (x / count).to(dtypes[n]) if x.is_floating_point() else x for n, x in total.items()}


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of `dtype` are computed."""
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
