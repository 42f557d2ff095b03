"""The slots (a module and a name in it) in which a model holds tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, each once under its first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


Slot = tuple[nn.Module, str]


class Slots:
    """The slots of each parameter and buffer of a model; a tied tensor has several."""

    def __init__(self, model: nn.Module) -> None:
        self._slots: dict[int, list[Slot]] = defaultdict(list)
        for module in model.modules():
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._slots[id(tensor)].append((module, key))

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Put `new` in all slots of `old`, as a parameter if `old` is one."""
        new = as_parameter_like(old, new)
        new.__dict__.update(old.__dict__)
        tie(self._slots[id(old)], new)

    @property
    def tied(self) -> list[list[Slot]]:
        """The slots of each tensor that has several, in the model's order."""
        return [slots for slots in self._slots.values() if len(slots) > 1]


def tie(slots: Sequence[Slot], tensor: Tensor) -> None:
    """Put `tensor` in all of `slots`."""
    for module, key in slots:
        setattr(module, key, tensor)


def as_parameter_like(old: Tensor, new: Tensor) -> Tensor:
    """`new`, as a parameter if `old` is one."""
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new


def empty_on_meta(tensor: Tensor) -> Tensor:
    """A tensor on the meta device with the shape, strides and dtype of `tensor`."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def unregistered_tensors(model: nn.Module) -> Iterator[tuple[Any, Any, Tensor]]:
    """Tensors that modules hold besides parameters and buffers, as ``(holder, key, tensor)``: `tensor` is
    ``holder[key]``.

    Searches attributes, and lists and dicts among them.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    for module in model.modules():
        attributes = vars(module)
        for holder in (attributes, *(attributes[key] for key in attributes.keys() - _REGISTERED)):
            if isinstance(holder, (dict, list)):
                for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
                    if isinstance(value, Tensor) and id(value) not in parameters:
                        yield holder, key, value


_REGISTERED = {"_parameters", "_buffers", "_modules"}
