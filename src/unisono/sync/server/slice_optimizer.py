"""The optimizer of one slice on a server: a copy of the worker's torch optimizer, for the pieces of the slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import InvalidInput
from unisono.sync.late_momentum import allow_late_momentum

ELEMENTWISE: dict[str, type[Optimizer]] = {
    cls.__name__: cls
    for cls in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad,
                torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta)
}  # fmt: skip
"""Elementwise optimizers, which can step a piece of a parameter without the rest."""
# Options that a worker chooses for its device, with their values on a server.
_DEVICE_OPTIONS = {"foreach": None, "capturable": False, "differentiable": False}
_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
# Servers compute on the CPU, where torch's fused SGD does not update most numbers of half precision (2.13).
_FUSED_DTYPES = (torch.float32, torch.float64)

Numbers = Mapping[str, Any]
"""A parameter group's hyperparameters, as JSON values."""
Place = tuple[int, str, bool]
"""The place of a tensor in the optimizer's state: index of the piece, key, whether it has the shape of the piece."""


def kind_of(optimizer: Optimizer) -> str:
    """The name in `ELEMENTWISE` of `optimizer`'s class. Raises `InvalidInput` if it has none."""
    name = type(optimizer).__name__
    if ELEMENTWISE.get(name) is not type(optimizer):
        raise InvalidInput("optimizer", name, "a server has only slices of parameters, and can step them only with an "
                           f"elementwise optimizer of torch ({', '.join(ELEMENTWISE)})",
                           "use one of these, or sync=AllReduce()")  # fmt: skip
    return name


def numbers_of(optimizer: Optimizer) -> list[Numbers]:
    """The current hyperparameters of all groups."""
    return [{name: _plain(name, group[name]) for name in optimizer.defaults} for group in optimizer.param_groups]


def _plain(name: str, value: Any) -> Any:
    if name in _DEVICE_OPTIONS:
        return _DEVICE_OPTIONS[name]
    if isinstance(value, tuple | list):
        return [_plain("", each) for each in value]
    return value.item() if isinstance(value, Tensor) else value


class SliceOptimizer:
    """The optimizer of one slice.

    Args:
        kind: the optimizer's name in `ELEMENTWISE`.
        groups: the hyperparameters of all parameter groups.
        members: for each piece, the index of its parameter group.
        weights: the weights of each piece, which `step` updates in place.
    """

    def __init__(self, kind: str, groups: Sequence[Numbers], members: Sequence[int], weights: Sequence[Tensor]) -> None:
        self._members = sorted(set(members))
        self._pieces = [nn.Parameter(each, requires_grad=False) for each in weights]
        self._fuses = kind in _FUSED and all(each.dtype in _FUSED_DTYPES for each in weights)
        optimizer_class: Any = ELEMENTWISE[kind]
        self._optimizer: Optimizer = optimizer_class([
            {"params": [p for p, m in zip(self._pieces, members) if m == member], **self._options(groups[member])}
            for member in self._members
        ])  # fmt: skip
        allow_late_momentum(self._optimizer)

    def set_weights(self, weights: Sequence[Tensor]) -> None:
        """Let later steps update `weights` in place of the earlier tensors, which have the same values."""
        for piece, each in zip(self._pieces, weights):
            piece.data = each

    def step(self, gradients: Sequence[Tensor | None], groups: Sequence[Numbers]) -> None:
        """Take one step with the hyperparameters `groups`; pieces without a gradient do not change."""
        for group, member in zip(self._optimizer.param_groups, self._members):
            group.update(self._options(groups[member]))
        for piece, gradient in zip(self._pieces, gradients):
            piece.grad = gradient
        self._optimizer.step()
        for piece in self._pieces:
            piece.grad = None

    def check(self, groups: Any, count: int) -> list[Numbers]:
        """Return `groups` if they are valid hyperparameters of `count` groups, else raise `ValueError`."""
        known = self._optimizer.defaults
        if not isinstance(groups, list) or len(groups) != count:
            raise ValueError(f"groups={groups!r} is not a list with the hyperparameters of {count} groups")
        for group in groups:
            if not isinstance(group, dict) or set(group) != set(known):
                raise ValueError(f"group {group!r} does not have exactly the hyperparameters {', '.join(known)}")
            if not all(_is_number(value) for value in group.values()):
                raise ValueError(f"group {group!r} has a hyperparameter that is not a number")
        return groups

    def state(self) -> tuple[list[Place], list[Tensor]]:
        """The places and the tensors of the optimizer's state; the tensors are read-only."""
        entries = [
            (i, key, torch.as_tensor(value))
            for i, piece in enumerate(self._pieces)
            for key, value in self._optimizer.state.get(piece, {}).items()
            if value is not None
        ]
        return [(i, key, t.shape == self._pieces[i].shape) for i, key, t in entries], [t for *_, t in entries]

    def load(self, places: Sequence[Place], tensors: Sequence[Tensor]) -> None:
        """Load what `state` returned; `tensors` are copied, and may be flat."""
        for (i, key, like), tensor in zip(places, tensors):
            piece = self._pieces[i]
            target = torch.empty_like(piece, dtype=tensor.dtype) if like else torch.empty((), dtype=tensor.dtype)
            self._optimizer.state[piece][key] = target.copy_(flat_as(tensor, target))

    def _options(self, numbers: Numbers) -> dict[str, Any]:
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in numbers.items()}
        if "fused" in options and (not self._fuses or options.get("dampening")):
            options["fused"] = None
        return options


def flat_as(flat: Tensor, like: Tensor) -> Tensor:
    """A view of `flat`, whose numbers are in the order of memory, in the shape of `like`, which is dense."""
    return flat.reshape(-1).as_strided(like.shape, like.stride())


def _is_number(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_number(each) for each in value)
    return value is None or isinstance(value, bool | int | float)
