"""Finds, by structure, the units of a model's chain: the modules that are in one stage as a whole."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def opened_modules(model: nn.Module, cuts: Iterable[str] = ()) -> set[str]:
    """Names of the modules that are opened, so that a stage can begin inside them; their other members are units.

    These are the model, the ancestors of a named cut, and containers on the way. A module that holds more than half of
    all parameters in more than one part is opened too (the trunk inside a head, the encoder inside a classifier).
    """
    whole = _size(model)
    found = {""}

    def look(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            if isinstance(child, CONTAINERS) or (2 * _size(child) > whole and _parts(child) > 1):
                found.add(inner)
                look(child, inner)

    look(model, "")
    for cut in cuts:
        steps = cut.split(".")[:-1]
        found |= {".".join(steps[: i + 1]) for i in range(len(steps))}
    return found - set(cuts)


def unit_names(model: nn.Module, opened: set[str]) -> list[str]:
    """Names of the units with parameters, in the order of the model."""
    names = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if path in opened
        for name, _ in module.named_children()
    ]
    return [n for n in names if n not in opened and _size(model.get_submodule(n))]


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _parts(module: nn.Module) -> int:
    """The number of child modules with parameters, counting inside containers."""
    count = 0
    for child in module.children():
        count += _parts(child) if isinstance(child, CONTAINERS) else bool(_size(child))
    return count
