"""Gives blocks of a model on the meta device random values temporarily, one block at a time to save memory.

Whether a split computes the same does not depend on weights and inputs, so random values suffice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


def is_meta(model: nn.Module) -> bool:
    """Whether any parameter of `model` is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def materialized(module: nn.Module) -> Iterator[None]:
    """A context in which parameters and buffers of `module` on the meta device have random values."""
    generator = torch.Generator().manual_seed(0)
    made: dict[Tensor, Tensor] = {}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    for inner in module.modules():
        registries: tuple[dict[str, Any], ...] = (inner._parameters, inner._buffers)
        for registry in registries:
            for name, tensor in registry.items():
                if tensor is not None and tensor.is_meta:
                    before.append((registry, name, tensor))
                    registry[name] = made.setdefault(tensor, _filled(tensor, generator))
    try:
        yield
    finally:
        for registry, name, tensor in before:
            registry[name] = tensor


def materialized_inputs(call: Any) -> Any:
    """`call` with random values in place of its meta tensors."""
    generator = torch.Generator().manual_seed(1)
    return tree_map(lambda x: _filled(x, generator) if isinstance(x, Tensor) and x.is_meta else x, call)


def _filled(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return torch.ones(tensor.shape, dtype=tensor.dtype)
    numbers = (torch.randn(tensor.shape, generator=generator) * 0.3).to(tensor.dtype)
    return nn.Parameter(numbers, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else numbers
