"""Tokens and the experts that they are for."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.errors import InvalidInput


@dataclass(frozen=True)
class Routed:
    """What a mixture computes.

    Args:
        tokens: (N, width).
        chosen: numbers of experts (N, k); a number that no expert has stands for none.
        weights: what each counts for (N, k).
    """

    tokens: Tensor
    chosen: Tensor
    weights: Tensor


@dataclass(frozen=True)
class MixtureArguments:
    """What a mixture's `forward` calls its arguments."""

    tokens: str
    chosen: str
    weights: str

    def read(self, given: inspect.BoundArguments) -> Routed:
        """What is asked for in a call with these arguments.

        Raises:
            InvalidInput: they are not as they were when the mixture was tried out.
        """
        tokens, chosen, weights = (given.arguments[name] for name in (self.tokens, self.chosen, self.weights))
        if chosen.is_floating_point() or chosen.shape != weights.shape:
            raise InvalidInput(
                "expert", self.chosen, f"a mixture was called with numbers {list(chosen.shape)} and weights "
                f"{list(weights.shape)}, not one of each for each choice", "leave out expert=")  # fmt: skip
        return Routed(tokens.flatten(0, -2), chosen.flatten(0, -2), weights.flatten(0, -2))

    def compute(self, module: nn.Module, given: inspect.BoundArguments, routed: Routed) -> Tensor:
        """The output (N, width) of `module` for `routed`, all other arguments being as `given`."""
        asked = {self.tokens: routed.tokens, self.chosen: routed.chosen, self.weights: routed.weights}
        call = inspect.BoundArguments(given.signature, OrderedDict({**given.arguments, **asked}))
        output: Tensor = module.forward(*call.args, **call.kwargs)  # by position where it can be: names are for people
        return output


@dataclass(frozen=True)
class Pairs:
    """Each token once for each of its experts, those of the first expert first.

    Args:
        order: which of the (token, choice) pairs, numbered row by row.
        counts: how many there are for each expert (experts,).
        shape: of all tokens' choices (N, k).
    """

    order: Tensor
    counts: Tensor
    shape: torch.Size

    @staticmethod
    def of(chosen: Tensor, experts: int) -> Pairs:
        """Those of `chosen` (N, k)."""
        numbers = chosen.reshape(-1)
        counts = torch.bincount(numbers, minlength=experts)[:experts]
        return Pairs(numbers.argsort(stable=True)[: int(counts.sum())], counts, chosen.shape)

    def tokens(self, tokens: Tensor) -> Tensor:
        """(N, width) to (pairs, width)."""
        return tokens[self.order // self.shape[1]]

    def weights(self, weights: Tensor) -> Tensor:
        """(N, k) to (pairs,)."""
        return weights.reshape(-1)[self.order]

    def summed(self, outputs: Tensor) -> Tensor:
        """(pairs, width) to (N, width), in the order of each token's choices: the same bits in every run."""
        places = outputs.new_zeros(self.shape.numel(), outputs.shape[1]).index_copy(0, self.order, outputs)
        return places.view(*self.shape, outputs.shape[1]).sum(1)


def expert_numbers(counts: Tensor) -> Tensor:
    """The number of its expert for each of the pairs that lie in the order of `counts` (..., experts)."""
    here = torch.arange(counts.shape[-1], device=counts.device).expand(counts.shape)
    return here.reshape(-1).repeat_interleave(counts.reshape(-1))
