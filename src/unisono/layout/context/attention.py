"""Attention of a worker's queries to the keys and values of the whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.errors import InvalidInput
from unisono.layout.context.group import Peers
from unisono.layout.context.masks import causal_mask, global_mask
from unisono.layout.context.ring_attention import ring
from unisono.layout.context.sequence_split import SequenceSplit

FORMS = ("gather", "ring")


def attend(
    split: SequenceSplit,
    peers: Peers,
    form: str,
    keys: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Collective: ``scaled_dot_product_attention`` of local queries ``[..., local, E]`` over the keys and values of all
    ranks.

    Where the keys are not the split sequence, torch's own attention is called: for a cross-attention to a tensor that
    every worker has whole, or an attention over channels.

    Args:
        form: ``gather`` holds all keys and values at once, ``ring`` those of at most two workers.
        keys: ``[N, length]`` for the whole micro-batch, false at padding. It has no effect next to an `attn_mask` that
            is not causal, which must mark padding itself. None: no padding.

    Raises:
        InvalidInput: dropout is on, the mask fits neither the part nor the whole, or there are not as many queries as
            local keys.
    """
    crossed = key.shape[-2] != split.local
    if split.size == 1 or (crossed and not is_causal):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    _check(split, query, key, attn_mask, dropout_p, is_causal)
    if keys is not None and query.dim() != 4:
        problem = f"attention with padding takes queries [N, heads, tokens, E], and these have {query.dim()} dimensions"
        raise InvalidInput("query", tuple(query.shape), problem, "add the dimensions of samples and heads")
    query, key, value = _autocast(query, key, value)
    mask, is_causal = global_mask(attn_mask, is_causal, keys, split, peers)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    learned = mask is not None and mask.requires_grad  # the ring computes no gradient of the mask
    if form == "ring" and not learned:
        return ring(query, key, value, mask, is_causal, scale, split, peers)
    return gather(query, key, value, mask, is_causal, scale, split, peers)


def gather(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    split: SequenceSplit,
    peers: Peers,
) -> Tensor:
    """Collective: attention with all keys and values from one all-gather; in backward, one reduce-scatter (Dubey et al.
    2024, 3.3.2)."""
    gathered = peers.gather(torch.cat([key.reshape(-1), value.reshape(-1)]))
    grouped = key.dim() > 2 and query.shape[-3] != key.shape[-3]
    keys = split.join([row[: key.numel()].view(key.shape) for row in gathered], -2)
    values = split.join([row[key.numel() :].view(value.shape) for row in gathered], -2)
    if not is_causal:
        return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=grouped)
    seen = causal_mask(split, peers.rank, query.device)
    rows = []
    for i, (_, stop) in enumerate(split.spans(peers.rank)):  # a chunk attends to no later tokens
        mine = slice(i * split.chunk, (i + 1) * split.chunk)
        rows.append(F.scaled_dot_product_attention(
            query[..., mine, :], keys[..., :stop, :], values[..., :stop, :], seen[mine, :stop],
            scale=scale, enable_gqa=grouped,
        ))  # fmt: skip
    return torch.cat(rows, -2)


def _check(
    split: SequenceSplit, query: Tensor, key: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool
) -> None:
    what = f"queries {tuple(query.shape)}, keys {tuple(key.shape)}"
    if dropout_p:
        raise InvalidInput("dropout", dropout_p, f"attention over {split.size} workers cannot apply dropout",
                           "set the model's attention dropout to 0")  # fmt: skip
    if is_causal and mask is not None:
        raise InvalidInput("attn_mask", what, "attention takes a mask or is_causal=True, not both", "pass one of them")
    if not query.shape[-2] == key.shape[-2] == split.local:
        raise InvalidInput(
            "attention",
            what,
            f"both must have this worker's {split.local} of the sequence's {split.length} tokens",
            "use context=1 for models with latent queries or causal cross-attention",
        )


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """The operands as autocast would convert them for torch's own attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    wanted = torch.get_autocast_dtype(device)
    return [x.to(wanted) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]
