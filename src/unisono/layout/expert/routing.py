"""Tokens, and the experts that they are routed to."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.errors import InvalidInput


@dataclass(frozen=True)
class Routed:
    """The tensor arguments of a mixture.

    Args:
        tokens: the tokens (N, width).
        chosen: indices of the experts of each token (N, k); an index that no expert has stands for no expert.
        weights: the weights of these experts' outputs (N, k).
    """

    tokens: Tensor
    chosen: Tensor
    weights: Tensor


@dataclass(frozen=True)
class MixtureArguments:
    """The names of a mixture's arguments in its `forward`."""

    tokens: str
    chosen: str
    weights: str

    def read(self, given: inspect.BoundArguments) -> Routed:
        """The `Routed` tensors of a call.

        Raises:
            InvalidInput: expert indices are not integers, or are not of the weights' shape.
        """
        tokens, chosen, weights = (given.arguments[name] for name in (self.tokens, self.chosen, self.weights))
        if chosen.is_floating_point() or chosen.shape != weights.shape:
            raise InvalidInput(
                "expert", self.chosen, f"a mixture was called with expert indices {list(chosen.shape)} of "
                f"{chosen.dtype} and weights {list(weights.shape)}; indices must be integers of the weights' shape",
                "omit expert=")  # fmt: skip
        return Routed(tokens.flatten(0, -2), chosen.flatten(0, -2), weights.flatten(0, -2))

    def compute(self, module: nn.Module, given: inspect.BoundArguments, routed: Routed) -> Tensor:
        """The output (N, width) of `module` for `routed`; all other arguments are those in `given`."""
        asked = {self.tokens: routed.tokens, self.chosen: routed.chosen, self.weights: routed.weights}
        call = inspect.BoundArguments(given.signature, OrderedDict({**given.arguments, **asked}))
        output: Tensor = module.forward(
            *call.args, **call.kwargs
        )  # by position where possible, as subclasses may use other names
        return output


@dataclass(frozen=True)
class Pairs:
    """The pairs of a token and one of its k experts, sorted by expert.

    Args:
        order: for each pair, its index in the flattened choices (N, k) of all tokens.
        counts: the number of pairs of each expert (experts,).
        shape: the shape (N, k) of all tokens' choices.
    """

    order: Tensor
    counts: Tensor
    shape: torch.Size

    @staticmethod
    def of(chosen: Tensor, experts: int) -> Pairs:
        """The pairs of `chosen` (N, k)."""
        numbers = chosen.reshape(-1)
        counts = torch.bincount(numbers, minlength=experts)[:experts]
        return Pairs(numbers.argsort(stable=True)[: int(counts.sum())], counts, chosen.shape)

    def tokens(self, tokens: Tensor) -> Tensor:
        """The token of each pair, (pairs, width), from `tokens` (N, width)."""
        return tokens[self.order // self.shape[1]]

    def weights(self, weights: Tensor) -> Tensor:
        """The weight of each pair, (pairs,), from `weights` (N, k)."""
        return weights.reshape(-1)[self.order]

    def summed(self, outputs: Tensor) -> Tensor:
        """The sum of each token's outputs, (N, width), from the outputs (pairs, width) of all pairs.

        Sums in the order of each token's choices, so the result is deterministic.
        """
        places = outputs.new_zeros(self.shape.numel(), outputs.shape[1]).index_copy(0, self.order, outputs)
        return places.view(*self.shape, outputs.shape[1]).sum(1)


def expert_numbers(counts: Tensor) -> Tensor:
    """The expert index of each pair, where pairs are in the order of `counts` (..., experts)."""
    here = torch.arange(counts.shape[-1], device=counts.device).expand(counts.shape)
    return here.reshape(-1).repeat_interleave(counts.reshape(-1))
