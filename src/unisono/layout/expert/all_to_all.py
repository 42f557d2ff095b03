"""Messages in an expert group: tokens to their experts, and outputs back (Lepikhin et al. 2020, "GShard", section 3.2;
but with exact counts, so nothing is padded or dropped)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from unisono.layout.expert.routing import Pairs, Routed, expert_numbers


def compute_routed(compute: Callable[[Routed], Tensor], routed: Routed, share: int, group: dist.ProcessGroup) -> Tensor:
    """Collective: the experts' output for this rank's tokens (N, width); each rank passes its own tokens.

    Args:
        compute: computes this rank's `share` experts, which are numbered from 0 in its argument.
    """
    members = dist.get_world_size(group)
    pairs = Pairs.of(routed.chosen, share * members)
    sent_counts = pairs.counts.view(members, share)
    received_counts = _exchange_rows(sent_counts, [1] * members, [1] * members, group)
    sent, received = sent_counts.sum(1).tolist(), received_counts.sum(1).tolist()
    tokens = all_to_all_rows(pairs.tokens(routed.tokens), received, sent, group)
    weights = all_to_all_rows(pairs.weights(routed.weights), received, sent, group)
    outputs = _compute(compute, Routed(tokens, expert_numbers(received_counts).unsqueeze(1), weights.unsqueeze(1)))
    return pairs.summed(all_to_all_rows(outputs, sent, received, group))


def _compute(compute: Callable[[Routed], Tensor], routed: Routed) -> Tensor:
    if len(routed.tokens):
        return compute(routed)
    # Without tokens, compute a dummy token, so that every parameter gets a gradient (zero) and backward makes its
    # all-to-all. The other ranks wait for both.
    dummy = Routed(*(torch.cat([x, x.new_zeros(1, x.shape[1])]) for x in vars(routed).values()))
    return compute(dummy)[:0]


def all_to_all_rows(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Collective: sends the first ``sent[0]`` rows of `x` to rank 0 and so on; returns the received rows, by rank.
    Gradients take the reverse path."""
    return cast(Callable[..., Tensor], _ExchangeRows.apply)(x, received, sent, group)


def _exchange_rows(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    pending = collectives.all_to_all_single(x.contiguous(), received, sent, group)
    return cast(Tensor, collectives.wait_tensor(pending))


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _exchange_rows(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _exchange_rows(gradients[0], ctx.sent, ctx.received, ctx.group), None, None, None
