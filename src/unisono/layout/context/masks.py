"""Derives an attention mask for the keys of the whole sequence from the mask that a model made for its part."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.errors import InvalidInput
from unisono.layout.context.group import Peers
from unisono.layout.context.sequence_split import SequenceSplit


def global_mask(
    mask: Tensor | None, is_causal: bool, keys: Tensor | None, split: SequenceSplit, peers: Peers
) -> tuple[Tensor | None, bool]:
    """A mask with columns for all keys, in the sequence's order, and a row for each local query, or one row for all.

    It is made from `mask`, by the shape of that:

    * ``[..., length, length]``: the rows of local queries are taken;
    * ``[..., local or 1, length or 1]``: unchanged;
    * ``[..., 1, local]``, a mask of keys: the columns of all ranks are gathered;
    * ``[..., local, local]``, made by the model from local tokens: accepted if it is a causal mask, else refused.

    Returns:
        The mask, and whether attention is causal instead. The mask is None if there is none, or only a causal one.

    Raises:
        InvalidInput: the mask does not say to which keys of other ranks the queries attend.
    """
    if mask is None or _is_causal(mask, split):
        past = is_causal or mask is not None
        return (None, past) if keys is None else (_padding_mask(keys, past, split, peers.rank), False)
    rows, columns = (mask.shape if mask.dim() > 1 else (1, *mask.shape))[-2:]
    if columns == split.length and rows == split.length:
        return split.part(mask, -2, peers.rank), False
    if columns in (split.length, 1) and rows in (split.local, 1):
        return mask.expand(*mask.shape[:-1], split.length), False
    if columns == split.local and rows == 1:
        return split.join(list(_gathered(mask, peers)), -1), False
    raise _ambiguous(mask, split)


def causal_mask(split: SequenceSplit, rank: int, device: torch.device) -> Tensor:
    """True where a local query (row) may attend to a key (column) under a causal mask, bool ``[local, length]``."""
    return split.positions(rank, device)[:, None] >= torch.arange(split.length, device=device)


def _padding_mask(keys: Tensor, past: bool, split: SequenceSplit, rank: int) -> Tensor:
    real = keys.bool()[:, None, None, :]
    return real & causal_mask(split, rank, keys.device) if past else real


def _is_causal(mask: Tensor, split: SequenceSplit) -> bool:
    """Whether `mask` is the causal mask of the local tokens; false for a single token, whose mask is ambiguous."""
    if mask.shape[-2:] != (split.local, split.local) or split.local == 1:
        return False
    triangle = torch.ones(split.local, split.local, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return bool((mask == triangle).all())
    least = torch.finfo(mask.dtype).min
    return bool(((mask == 0) == triangle).all() and ((mask <= least) != triangle).all())


def _gathered(mask: Tensor, peers: Peers) -> Tensor:
    if mask.dtype == torch.bool:  # not every backend supports bool
        return peers.gather(mask.to(torch.uint8)).bool()
    return peers.gather(mask)


def _ambiguous(mask: Tensor, split: SequenceSplit) -> InvalidInput:
    return InvalidInput(
        "attn_mask",
        f"a mask {tuple(mask.shape)}",
        f"with context = {split.size} a worker has {split.local} queries for {split.length} keys, and this mask does"
        " not cover the other workers' tokens",
        f"pass is_causal=True, or a mask [..., {split.local} or {split.length}, {split.length}]; pass a padding mask"
        " as an input of the model",
    )
