"""The blocks that repeat in a model: found by structure; what they compute with is gathered, computed again and compiled
one by one."""

from __future__ import annotations

from torch import nn


def blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost members of the model's lists and sequences that have parameters: what repeats."""
    if isinstance(model, nn.ModuleList | nn.Sequential):
        return [block for block in model if any(True for _ in block.parameters())]
    return [block for child in model.children() for block in blocks(child)]
