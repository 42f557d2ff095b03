"""State of a custom loop besides model and optimizer, as tensors that other workers can receive. Nothing is pickled."""

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
    """An object with a state that can be saved and restored, such as a learning-rate scheduler."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state: whatever changes during training."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore a state that `state_dict` returned."""


class ExtraState:
    """Objects that a custom loop registered by name, and the hyperparameters of the optimizer's parameter groups.

    Schedulers change the hyperparameters, so they are a part of the state.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._stateful: dict[str, Stateful] = {_GROUPS: _Groups(optimizer)}

    def replace_optimizer(self, optimizer: Optimizer) -> None:
        """The hyperparameters are those of `optimizer` from now on."""
        self._stateful[_GROUPS] = _Groups(optimizer)

    def add(self, name: str, stateful: Stateful) -> None:
        """Register `stateful` as `name`.

        Raises:
            InvalidInput: `stateful` is not a `Stateful`, its state cannot be sent, or `name` is empty, contains a
                slash, or is registered already.
        """
        if not name or "/" in name:
            problem = "a name must not contain '/'" if name else "a name must not be empty"
            raise InvalidInput("name", name or "(nothing)", problem, "write a name such as scheduler")
        if name in self._stateful:
            raise InvalidInput("name", name, "an object is already registered under it", "choose another name")
        if not (
            callable(getattr(stateful, "state_dict", None)) and callable(getattr(stateful, "load_state_dict", None))
        ):
            raise InvalidInput(name, type(stateful).__name__, "it has no state_dict() and load_state_dict(state)",
                               "write both, or register an object that has them")  # fmt: skip
        to_tensors(name, stateful.state_dict())
        self._stateful[name] = stateful

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the whole state."""
        return {
            n: t
            for name, stateful in self._stateful.items()
            for n, t in to_tensors(name, stateful.state_dict()).items()
        }

    def load_state_dict(
        self,
        tensors: Mapping[str, Tensor],
        source: str = "other workers have",
        cure: str = "register the same on all workers",
    ) -> None:
        """Restore the whole state from a `state_dict` of this worker, of another worker, or of an earlier run.

        Args:
            source, cure: who else has the state, and what to do if it differs, as words of the error message.

        Raises:
            InvalidInput: the names in `tensors` are not those registered here.
        """
        names = {name.partition("/")[0] for name in tensors}
        if names != self._stateful.keys():
            here, there = (", ".join(sorted(each - {_GROUPS})) or "nothing" for each in (set(self._stateful), names))
            raise InvalidInput("register_state", here, f"{source} {there}", cure)
        for name, stateful in self._stateful.items():
            stateful.load_state_dict(from_tensors(name, tensors))


class _Groups:
    """The parameter groups of an optimizer, without their parameters, and which of these are frozen."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        groups = self._optimizer.param_groups
        return {
            "groups": [{key: value for key, value in g.items() if key not in _LEFT_OUT} for g in groups],
            "trained": "".join("01"[p.requires_grad] for g in groups for p in g["params"]),
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        for group, values in zip(self._optimizer.param_groups, state_dict["groups"], strict=True):
            group.update(values)
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for parameter, trained in zip(parameters, state_dict.get("trained", ""), strict=False):  # older ones have none
            parameter.requires_grad_(trained == "1")


_GROUPS = "optimizer groups"
_LEFT_OUT = ("params", "param_names")
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def to_tensors(name: str, value: Any) -> dict[str, Tensor]:
    """`value` as tensors: its structure as JSON under `name`, and each tensor in it as ``name/number``.

    Raises:
        InvalidInput: a part of `value` is neither JSON nor a tensor; the message names the part.
    """
    tensors: list[Tensor] = []
    text = json.dumps(_to_plain(value, tensors, name)).encode()
    numbered = {f"{name}/{i}": tensor for i, tensor in enumerate(tensors)}
    return {name: torch.frombuffer(bytearray(text), dtype=torch.uint8), **numbered}


def from_tensors(name: str, tensors: Mapping[str, Tensor]) -> Any:
    """The value from which `to_tensors` made the tensors of `name`."""
    return _from_plain(json.loads(bytes(raw_bytes(tensors[name]))), name, tensors)


def _to_plain(value: Any, tensors: list[Tensor], where: str) -> Any:
    """`value` as JSON, with its tensors appended to `tensors`. A JSON list begins with the type of its value."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value.detach().clone())
        return ["tensor", len(tensors) - 1]
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return [
            kind,
            *([_to_plain(k, tensors, where), _to_plain(v, tensors, f"{where}[{k!r}]")] for k, v in value.items()),
        ]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, list | tuple | set | frozenset):
        base = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        return [base.__name__, *(_to_plain(each, tensors, f"{where}[{i}]") for i, each in enumerate(value))]
    raise InvalidInput(where, type(value).__name__, "it cannot be sent to another worker", "use numbers, strings, "
                       "bytes, tensors, and lists, tuples, sets and dictionaries of them")  # fmt: skip


def _from_plain(plain: Any, name: str, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(plain, list):
        return plain
    kind, *items = plain
    if kind == "bytes":
        return bytes.fromhex(items[0])
    if kind == "tensor":
        return tensors[f"{name}/{items[0]}"].clone()
    if kind in ("dict", "counter"):
        pairs: Sequence[tuple[Any, Any]] = [
            (_from_plain(k, name, tensors), _from_plain(v, name, tensors)) for k, v in items
        ]
        return Counter(dict(pairs)) if kind == "counter" else dict(pairs)
    return _SEQUENCES[kind](_from_plain(each, name, tensors) for each in items)
