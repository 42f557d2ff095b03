"""Which modules of a model are the units of its chain: found by structure."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def opened_modules(model: nn.Module, cuts: Iterable[str] = ()) -> set[str]:
    """Names of the modules to look into; all others that they hold are units.

    Looked into are the model, what stands above a named cut, containers on the way, and a module that holds more than
    half of all parameters (the trunk inside a head, the encoder inside a classifier) in more than one part.
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


def unit_names(model: nn.Module, looked_into: set[str]) -> list[str]:
    """Names of the units with parameters, in the order in which the model lists them."""
    names = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if path in looked_into
        for name, _ in module.named_children()
    ]
    return [n for n in names if n not in looked_into and _size(model.get_submodule(n))]


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _parts(module: nn.Module) -> int:
    """Into how many modules with parameters it falls, containers looked into."""
    count = 0
    for child in module.children():
        count += _parts(child) if isinstance(child, CONTAINERS) else bool(_size(child))
    return count
