"""What passes between the members of an expert group: tokens to their experts, and what these make of them back
(Lepikhin et al. 2020, "GShard", section 3.2; counts differ, so that nothing is padded or dropped)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from unisono.layout.expert.routing import Pairs, Routed, expert_numbers


def compute_routed(compute: Callable[[Routed], Tensor], asked: Routed, share: int, group: dist.ProcessGroup) -> Tensor:
    """What the experts of all members make of this member's tokens (N, width); all members call it alike, each with
    tokens of its own.

    Args:
        compute: this member's `share` of experts, numbered from 0.
    """
    members = dist.get_world_size(group)
    pairs = Pairs.of(asked.chosen, share * members)
    leaving = pairs.counts.view(members, share)
    coming = _exchange_rows(leaving, [1] * members, [1] * members, group)
    sent, received = leaving.sum(1).tolist(), coming.sum(1).tolist()
    tokens = all_to_all_rows(pairs.tokens(asked.tokens), received, sent, group)
    weights = all_to_all_rows(pairs.weights(asked.weights), received, sent, group)
    outputs = _compute(compute, Routed(tokens, expert_numbers(coming).unsqueeze(1), weights.unsqueeze(1)))
    return pairs.summed(all_to_all_rows(outputs, sent, received, group))


def _compute(compute: Callable[[Routed], Tensor], routed: Routed) -> Tensor:
    if len(routed.tokens):
        return compute(routed)
    # Nobody asks: a made-up token all the same, so that every parameter has its gradient (which is zero) and the way
    # back its part in backward. The others wait for both.
    made_up = Routed(*(torch.cat([x, x.new_zeros(1, x.shape[1])]) for x in vars(routed).values()))
    return compute(made_up)[:0]


def all_to_all_rows(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of `x`, the first ``sent[0]`` to member 0 and so on; those that came, in the order of the members.
    Gradients go the same way back."""
    return cast(Callable[..., Tensor], _ExchangeRows.apply)(x, received, sent, group)


def _exchange_rows(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    there = collectives.all_to_all_single(x.contiguous(), received, sent, group)
    return cast(Tensor, collectives.wait_tensor(there))


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _exchange_rows(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _exchange_rows(gradients[0], ctx.sent, ctx.received, ctx.group), None, None, None
