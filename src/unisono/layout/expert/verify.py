"""Verifies the split of a mixture in one process, before training: compares all its parts together with the whole."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from unisono.layout.expert.find_experts import expert_count, positional_arguments, token_widths
from unisono.layout.expert.partial_mixture import PartialMixture, count_attributes
from unisono.layout.expert.routing import MixtureArguments, Pairs, Routed, expert_numbers
from unisono.layout.tensor.forward_trace import Call, evaluating
from unisono.layout.tensor.materialize import materialized
from unisono.layout.tensor.numeric_compare import PassResult, difference, run_pass

TOKENS = 32


def verify_mixture(module: nn.Module, degree: int) -> tuple[MixtureArguments, PartialMixture] | str:
    """How `module` is called and split; or the reason why it cannot be split.

    Outputs and gradients are compared within 1e-5 of their largest element, as on the tensor axis. A module on the meta
    device temporarily gets random values.
    """
    number, refused = expert_count(module), ""
    with evaluating(module), materialized(module), torch.enable_grad():
        for calling, call in _candidate_calls(module, number):
            try:
                expected = run_pass(partial(_run_whole, module, calling), module, call)
            except Exception as error:  # the user's code may raise anything for unknown arguments
                refused = (
                    refused or f"called with tokens, expert indices and weights, its code fails: {_describe(error)}"
                )
                continue
            if [x.shape for x in expected.outputs] != [call[0][0].shape]:
                continue
            for counts in (True, False) if _has_counts(module, number) else (False,):
                part = PartialMixture(type(module), number, number // degree, counts)
                found = _differs(module, calling, part, call, expected)
                if not found:
                    return calling, part
                refused = found
    return refused or "its output has another shape than the tokens"


def mixture_signature(module: nn.Module) -> object:
    """A key that is equal for mixtures of which only one needs to be verified."""
    shapes = tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())
    numbers = tuple((name, value) for name, value in vars(module).items() if type(value) in (int, float, bool, str))
    return type(module), shapes, numbers, "forward" in vars(module)


def _candidate_calls(module: nn.Module, number: int) -> Iterator[tuple[MixtureArguments, Call]]:
    """Ways to call `module`, the usual one first, with random arguments (tokens, chosen, weights)."""
    generator, dtype = torch.Generator().manual_seed(2), next(module.parameters()).dtype
    device = torch.device("cpu") if next(module.parameters()).is_meta else next(module.parameters()).device
    weights, chosen = torch.rand(TOKENS, number, generator=generator).topk(2)
    for names in permutations(positional_arguments(module)[:3]):
        for width in token_widths(module):
            tokens = torch.randn(TOKENS, width, generator=generator)
            yield (
                MixtureArguments(*names),
                ((tokens.to(device, dtype), chosen.to(device), weights.to(device, dtype)), {}),
            )


def _has_counts(module: nn.Module, number: int) -> bool:
    return any(count_attributes(inner, number) for inner in module.modules())


def _run_whole(module: nn.Module, calling: MixtureArguments, call: Call) -> Tensor:
    return calling.compute(module, _bound(module, calling, call), Routed(*call[0]))


def _bound(module: nn.Module, calling: MixtureArguments, call: Call) -> inspect.BoundArguments:
    named = OrderedDict(zip(vars(calling).values(), call[0]))
    return inspect.BoundArguments(inspect.signature(module.forward), named)


def _differs(
    module: nn.Module, calling: MixtureArguments, part: PartialMixture, call: Call, expected: PassResult
) -> str:
    try:
        outcome = run_pass(partial(_emulate, module, calling, part), module, call)
    except Exception as error:  # the user's code may raise anything for a part
        return f"its code fails with some of its experts: {_describe(error)}"
    return difference(expected, outcome)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _emulate(module: nn.Module, calling: MixtureArguments, part: PartialMixture, call: Call) -> Any:
    asked, given = Routed(*call[0]), _bound(module, calling, call)
    pairs = Pairs.of(asked.chosen, part.experts)
    tokens, weights = pairs.tokens(asked.tokens), pairs.weights(asked.weights).unsqueeze(1)
    outputs, begin = [], 0
    for first in range(0, part.experts, part.share):
        counts = pairs.counts[first : first + part.share]
        mine = slice(begin, begin := begin + int(counts.sum()))
        member = part.of(module, lambda p, first=first: p[first : first + part.share])  # type: ignore[misc]
        routed = Routed(tokens[mine], expert_numbers(counts).unsqueeze(1), weights[mine])
        outputs.append(calling.compute(member, given, routed))
    return pairs.summed(torch.cat(outputs))
