"""Signatures of blocks that compute the same except for their weights."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from unisono.layout.tensor.forward_trace import Call

_PLAIN = (bool, int, float, str, type(None))
_TORCHS_OWN = ("_parameters", "_buffers", "_modules")


def block_signature(model: nn.Module, scope: str, unit: Mapping[str, str], call: Call) -> Hashable:
    """A key that is equal for two units of which only one needs to be tried.

    Their scopes have modules of the same kinds, attributes and shapes, and equal arguments. Objects other than plain
    values and tensors must be identical.
    """
    inside = tuple((name, _module_key(module)) for name, module in model.get_submodule(scope).named_modules())
    words = tuple((name.removeprefix(scope), word) for name, word in unit.items())
    leaves, form = tree_flatten(call)
    return inside, words, str(form), tuple(map(_value_key, leaves))


def _module_key(module: nn.Module) -> Hashable:
    own = [(key, _value_key(value)) for key, value in vars(module).items() if key not in _TORCHS_OWN]
    held = [(key, _value_key(value)) for kept in (module._parameters, module._buffers) for key, value in kept.items()]
    return type(module), tuple(own), tuple(held)


def _value_key(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_value_key, value))
    if isinstance(value, dict | set) and not value:  # no hooks
        return type(value)
    return id(value)
