"""Finds mixtures of experts in any model, by the shapes of their parameters and their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import cast

from torch import nn

SEPARATE = "its experts are modules that the model's own code calls one by one, if they have tokens"


def find_mixtures(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of the outermost modules whose parameters each contain all experts of a mixture."""
    found: list[str] = []
    for name, module in model.named_modules():
        if not any(name.startswith(f"{outer}.") for outer in found) and expert_count(module):
            found.append(name)
            yield name, module


def expert_count(module: nn.Module) -> int:
    """The number of experts in `module`; 0 if it does not look like a mixture.

    A mixture has parameters of equal first dimension, some of them a matrix per expert, and at least three arguments:
    tokens, expert indices, weights.
    """
    lengths = {p.shape[0] if p.ndim else 0 for p in module.parameters()}
    if len(lengths) != 1 or not any(p.ndim >= 3 for p in module.parameters()) or len(positional_arguments(module)) < 3:
        return 0
    (length,) = lengths
    return length if length > 1 else 0


def positional_arguments(module: nn.Module) -> list[str]:
    """Names of the arguments that `module` accepts by position."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in by_position]


def expert_lists(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of lists of experts, and why they cannot be split."""
    for name, module in model.named_modules():
        listed = isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module) > 1
        if listed and "expert" in name.rpartition(".")[2].lower() and any(True for _ in module.parameters()):
            yield name, SEPARATE


def shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that several modules of `model` hold."""
    seen: set[nn.Parameter] = set()
    twice: set[nn.Parameter] = set()
    for module in model.modules():
        own = {parameter for parameter in module._parameters.values() if parameter is not None}
        twice |= own & seen
        seen |= own
    return twice


def token_widths(module: nn.Module) -> list[int]:
    """Possible token widths of a mixture, by its matrices."""
    sizes = [size for p in module.parameters() if p.ndim >= 3 for size in (p.shape[-1], p.shape[-2])]
    return cast(list[int], list(dict.fromkeys(sizes)))
