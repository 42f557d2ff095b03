"""Mixtures of experts in an unknown model: found by the shapes of what they hold and how they are called."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import cast

from torch import nn

SEPARATE = "its experts are modules that the model's own code calls one by one, those that have tokens"


def find_mixtures(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of the outermost modules that hold all experts of a mixture in each of their parameters."""
    found: list[str] = []
    for name, module in model.named_modules():
        if not any(name.startswith(f"{outer}.") for outer in found) and expert_count(module):
            found.append(name)
            yield name, module


def expert_count(module: nn.Module) -> int:
    """How many experts `module` holds; 0 if it does not look like a mixture.

    It does where all its parameters are equally long, some of them being matrices for each expert, and where it is
    called with three tensors: tokens, numbers of experts, weights.
    """
    lengths = {p.shape[0] if p.ndim else 0 for p in module.parameters()}
    if len(lengths) != 1 or not any(p.ndim >= 3 for p in module.parameters()) or len(positional_arguments(module)) < 3:
        return 0
    (length,) = lengths
    return length if length > 1 else 0


def positional_arguments(module: nn.Module) -> list[str]:
    """What `module` can be called with by position."""
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
    """How wide the tokens of a mixture may be, by its matrices."""
    sizes = [size for p in module.parameters() if p.ndim >= 3 for size in (p.shape[-1], p.shape[-2])]
    return cast(list[int], list(dict.fromkeys(sizes)))
