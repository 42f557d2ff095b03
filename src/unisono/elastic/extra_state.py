"""What a loop of one's own keeps beside model and optimizer, as tensors that travel to whoever comes: nothing is
pickled."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.checkpoint.fingerprint import raw_bytes
from unisono.errors import InvalidInput


class Stateful(Protocol):
    """A learning-rate scheduler, say."""

    def state_dict(self) -> Mapping[str, Any]:
        """All that changes in it."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go on from there."""


class ExtraState:
    """Things by name, and the hyperparameters of the optimizer's groups, which schedulers change."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._things: dict[str, Stateful] = {_GROUPS: _Groups(optimizer)}

    def add(self, name: str, thing: Stateful) -> None:
        """Keep `thing` under `name`.

        Raises:
            InvalidInput: it is no such thing, has what cannot travel, or the name is taken.
        """
        if not name or "/" in name or name in self._things:
            raise InvalidInput("name", name, "taken, empty or with a slash", "give each thing a name of its own")
        if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
            raise InvalidInput(name, type(thing).__name__, "it has no state_dict() and load_state_dict(state)",
                               "write both, or keep an object that has them")  # fmt: skip
        written(name, thing.state_dict())
        self._things[name] = thing

    def take(self) -> dict[str, Tensor]:
        """All of it, as it is now; copies."""
        return {n: t for name, thing in self._things.items() for n, t in written(name, thing.state_dict()).items()}

    def give(
        self, tensors: Mapping[str, Tensor], theirs: str = "the others keep", cure: str = "keep the same on all workers"
    ) -> None:
        """Have all of it be as it was at `take`, here, on another worker, or in an earlier run.

        Args:
            theirs, cure: words for the error.

        Raises:
            InvalidInput: other things were kept there.
        """
        names = {name.partition("/")[0] for name in tensors}
        if names != self._things.keys():
            here, there = (", ".join(sorted(each - {_GROUPS})) or "nothing" for each in (set(self._things), names))
            raise InvalidInput("register_state", here, f"{theirs} {there}", cure)
        for name, thing in self._things.items():
            thing.load_state_dict(read(name, tensors))


class _Groups:
    """All of an optimizer's groups but their parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        groups = self._optimizer.param_groups
        return {"groups": [{key: value for key, value in g.items() if key not in _LEFT_OUT} for g in groups]}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        for group, values in zip(self._optimizer.param_groups, state_dict["groups"], strict=True):
            group.update(values)


_GROUPS = "optimizer groups"
_LEFT_OUT = ("params", "param_names")


def written(name: str, value: Any) -> dict[str, Tensor]:
    """`value` as tensors: its structure as JSON under `name`, and each tensor in it as ``name/number``.

    Raises:
        InvalidInput: something in it is neither; says where.
    """
    tensors: list[Tensor] = []
    text = json.dumps(_plain(value, tensors, name)).encode()
    found = {f"{name}/{i}": tensor for i, tensor in enumerate(tensors)}
    return {name: torch.frombuffer(bytearray(text), dtype=torch.uint8), **found}


def read(name: str, tensors: Mapping[str, Tensor]) -> Any:
    """What was `written` under `name`."""
    return _built(json.loads(bytes(raw_bytes(tensors[name]))), name, tensors)


def _plain(value: Any, tensors: list[Tensor], where: str) -> Any:
    """Of JSON's kinds; what is a list there begins with the kind of thing it stands for."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value.detach().clone())
        return ["tensor", len(tensors) - 1]
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return [kind, *([_plain(k, tensors, where), _plain(v, tensors, f"{where}[{k!r}]")] for k, v in value.items())]
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, *(_plain(each, tensors, f"{where}[{i}]") for i, each in enumerate(value))]
    raise InvalidInput(where, type(value).__name__, "it cannot be sent to another worker", "keep numbers, texts, "
                       "tensors, and lists and dictionaries of them")  # fmt: skip


def _built(plain: Any, name: str, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(plain, list):
        return plain
    kind, *items = plain
    if kind == "tensor":
        return tensors[f"{name}/{items[0]}"].clone()
    if kind in ("dict", "counter"):
        pairs: Sequence[tuple[Any, Any]] = [(_built(k, name, tensors), _built(v, name, tensors)) for k, v in items]
        return Counter(dict(pairs)) if kind == "counter" else dict(pairs)
    values = [_built(each, name, tensors) for each in items]
    return tuple(values) if kind == "tuple" else values
