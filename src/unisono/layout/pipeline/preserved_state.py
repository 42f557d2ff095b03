"""Runs modules without lasting effects on their state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unisono.layout.pipeline.rng_states import Generators


@contextmanager
def preserved_state(*modules: nn.Module, training: bool | None = None) -> Iterator[None]:
    """A context that, on exit, restores modes and buffers of `modules`, and the random generators.

    Args:
        training: the mode of the modules in the context; None: unchanged.
    """
    inside = {m: None for module in modules for m in module.modules()}
    modes = {m: m.training for m in inside}
    buffers = [(m._buffers, key, b, _copy(b)) for m in inside for key, b in m._buffers.items() if b is not None]
    generators = [Generators(device) for device in _devices(modules)]
    states = [g.states() for g in generators]
    try:
        for m in inside:
            m.training = m.training if training is None else training
        yield
    finally:
        for m, mode in modes.items():
            m.training = mode
        with torch.no_grad():
            for home, key, buffer, before in buffers:
                home[key] = buffer
                if before is not None and not torch.equal(buffer, before):
                    buffer.copy_(before)
        for g, state in zip(generators, states, strict=True):
            g.restore(state)


def _copy(buffer: Any) -> Any:
    return None if buffer.is_meta else buffer.detach().clone()


def _devices(modules: tuple[nn.Module, ...]) -> set[torch.device]:
    found = {p.device for module in modules for p in module.parameters() if not p.is_meta}
    return {device for device in found if device.type != "cpu"} or {torch.device("cpu")}
