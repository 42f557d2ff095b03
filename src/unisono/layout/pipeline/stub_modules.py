"""A stage of a model whose code cannot be written as a graph: the model's own forward, with stand-ins.

On every stage the model's own code runs. Units of earlier stages are replaced by stand-ins that give what arrived
from the stage before; the first unit of a later stage by one that takes what it is given and ends the forward pass.
Everything else that the code computes on the way (masks, rotary tables) it computes from the model's own inputs.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from unisono.layout.pipeline.preserved_state import preserved_state


class _StageOutput(Exception):
    """The stage is computed; carries what leaves it."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


class DataDependent(Exception):
    """The model's own code decides what it calls by numbers that it computes or draws at random."""


@dataclass
class StubInput:
    """Where what arrived from the stage before waits for the stand-ins, and what is to be done before the stage's first
    unit is called."""

    value: Tensor | None = None
    begin: Callable[[], None] | None = None

    def on_first_unit(self, *_: Any) -> None:
        """The first unit is called."""
        begin, self.begin = self.begin, None
        if begin is not None:
            begin()


@dataclass(frozen=True)
class UnitCall:
    """A call of a unit: the first tensor that it took, and what it gave; and whether anything that was made before it,
    but that tensor, was used during it or later."""

    unit: str
    input: Tensor | None
    output: Any
    crossed: bool


class _DependencyTracker(TorchDispatchMode):
    """Follows tensors past the calls of units, of which `call` is the latest.

    Of every tensor that depends on more than the model's inputs it knows the first call that it cannot get past: what a
    unit gives gets past the next one (there it arrives from the stage before), all else that was made in a unit or
    drawn at random does not, and what the model's own code makes of several gets as far as all of them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call, self.inside, self._python = -1, False, random.getstate()
        self.crossed: set[int] = set()
        self._end: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ends = [self._end[x] for x in _tensors((args, kwargs)) if x in self._end]
        self.crossed |= {call for end in ends for call in range(end, self.call + 1)}
        if ends and not self.inside and func is torch.ops.aten._local_scalar_dense.default:
            raise DataDependent
        out = func(*args, **(kwargs or {}))
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        if self.inside or drawn or ends:
            end = min([self.call + 1, *ends]) if drawn else self.call + 1 if self.inside else min(ends)
            for made in _tensors(out):
                self._end[made] = min(end, self._end.get(made, end))
        return out

    def enter(self) -> None:
        """A unit is called."""
        if random.getstate() != self._python:
            raise DataDependent
        self.call, self.inside = self.call + 1, True

    def leave(self, gave: Any) -> None:
        """It has given this."""
        self.inside, self._python = False, random.getstate()
        if isinstance(_first_element(gave), Tensor):
            self._end[_first_element(gave)] = self.call + 2


def unit_calls(model: nn.Module, units: Sequence[str], inputs: Mapping[str, Any], *, training: bool) -> list[UnitCall]:
    """The calls of `units` in one forward pass, in order.

    Raises:
        Decided: which they are depends on numbers.
    """
    seen: list[tuple[str, Tensor | None, Any]] = []
    flow = _DependencyTracker()

    def watch(unit: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen.append((unit, _first(args, kwargs), output))
            flow.leave(output)

        return hook

    modules = [model.get_submodule(u) for u in units]
    handles = [m.register_forward_pre_hook(lambda *_: flow.enter()) for m in modules]
    handles += [m.register_forward_hook(watch(u), with_kwargs=True) for u, m in zip(units, modules, strict=True)]
    try:
        with preserved_state(model, training=training), torch.no_grad(), flow:
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return [UnitCall(*visit, call in flow.crossed) for call, visit in enumerate(seen)]


def stub_cut_points(seen: Sequence[UnitCall]) -> list[str]:
    """Units at which a stage can begin: called once, on the very tensor that the unit called before it gave, which is
    all that they and what follows need of what was made before."""
    called = [v.unit for v in seen]
    good = []
    for before, after in pairwise(seen):
        once = called.count(after.unit) == called.count(before.unit) == 1
        if once and not after.crossed and after.input is not None and after.input is _first_element(before.output):
            good.append(after.unit)
    return good


class _Stub(nn.Module):
    """In place of a unit: knows what the unit knew about itself (`attention_type`, ...) but none of its tensors."""

    def __init__(self, unit: nn.Module, door: StubInput) -> None:
        super().__init__()
        mine = self.__dict__.keys() | {"forward"}  # which a unit that is split has as an attribute
        known = {k: v for k, v in unit.__dict__.items() if not k.startswith("_") and k not in mine}
        hollow = {
            name: torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)  # one number, however large
            for name, p in unit.named_parameters(recurse=False)
        }
        self.__dict__.update({**known, **hollow, "_door": door, "_kind": type(unit)})

    def __getattr__(self, name: str) -> Any:
        """A method of the unit that its `forward` is called by, too."""
        return self.forward if callable(getattr(self.__dict__["_kind"], name, None)) else super().__getattr__(name)


class EarlierStub(_Stub):
    """In place of a unit of an earlier stage."""

    def __init__(self, unit: nn.Module, door: StubInput, gave: Any) -> None:
        super().__init__(unit, door)
        self._more = len(gave) - 1 if isinstance(gave, tuple | list) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What arrived, of the form that the unit gives."""
        value = self.__dict__["_door"].value
        return value if self._more is None else (value, *[None] * self._more)


class LaterStub(_Stub):
    """In place of a unit of a later stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Ends the forward pass."""
        value = _first(args, kwargs)
        assert value is not None
        raise _StageOutput(value)


def with_stubs(model: nn.Module, stands: Mapping[str, nn.Module]) -> nn.Module:
    """`model` with stand-ins: modules above them are copied, all others are the model's own."""

    def copied(module: nn.Module, path: str) -> nn.Module:
        if path in stands:
            return stands[path]
        prefix = f"{path}." if path else ""
        if not any(name.startswith(prefix) for name in stands):
            return module
        new = copy.copy(module)
        new.__dict__ = dict(module.__dict__)
        new.__dict__["_modules"] = {k: m and copied(m, prefix + k) for k, m in module._modules.items()}
        return new

    return copied(model, "")


def stage_body(model: nn.Module, seen: Sequence[UnitCall], own: Collection[str], door: StubInput) -> nn.Module:
    """The model with stand-ins for all units but `own`."""
    order = list(dict.fromkeys(v.unit for v in seen))
    first = min(order.index(u) for u in own)
    gave = {v.unit: v.output for v in seen}
    stands: dict[str, nn.Module] = {}
    for place, unit in enumerate(order):
        module = model.get_submodule(unit)
        if unit not in own:
            stands[unit] = EarlierStub(module, door, gave[unit]) if place < first else LaterStub(module, door)
        elif place == first:
            module.register_forward_pre_hook(door.on_first_unit)
    return with_stubs(model, stands)


@dataclass(frozen=True)
class StubRun:
    """Computes one stage: what leaves it, or the model's output where it is the last.

    Args:
        body: what `body` gave, with `door`.
    """

    body: nn.Module
    stub_input: StubInput

    def __call__(self, values: tuple[Tensor, ...], inputs: Mapping[str, Any]) -> Any:
        self.stub_input.value = values[0] if values else None
        try:
            return self.body(**inputs)
        except _StageOutput as left:
            return (left.value,)
        finally:
            self.stub_input.value = None

    def begin_with(self, act: Callable[[], None]) -> None:
        """See `Stage.begin_with`: before its first unit the model's own code computes what earlier stages computed."""
        self.stub_input.begin = act


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _first(args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    return next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)


def _first_element(gave: Any) -> Any:
    return gave[0] if isinstance(gave, tuple | list) and gave else gave
