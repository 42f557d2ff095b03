"""Stages of a model whose code cannot be written as a graph: the model's own forward, with stub modules.

Every stage runs the model's own code. Stubs replace the units of earlier stages and return the tensor received from the
previous stage. A stub for the first unit of a later stage takes its input and ends the forward pass. All other values
(masks, rotary tables) are computed from the model's own inputs.
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
    """Ends the forward pass of a stage, and carries its output."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


class DataDependent(Exception):
    """The model's own code selects its calls by values that it computes or draws at random."""


@dataclass
class StubInput:
    """The tensor received from the previous stage, which stubs return; and an action to run before the first unit."""

    value: Tensor | None = None
    begin: Callable[[], None] | None = None

    def on_first_unit(self, *_: Any) -> None:
        """Run the action once, as a hook before the stage's first unit."""
        begin, self.begin = self.begin, None
        if begin is not None:
            begin()


@dataclass(frozen=True)
class UnitCall:
    """A call of a unit.

    Attributes:
        input: its first tensor argument.
        output: its result.
        crossed: whether a value computed before the call, other than `input`, was used during the call or later.
    """

    unit: str
    input: Tensor | None
    output: Any
    crossed: bool


class _DependencyTracker(TorchDispatchMode):
    """Tracks through which calls of units tensors can pass; `call` is the latest call.

    For each tensor that depends on more than the model's inputs, it stores the first call that the tensor cannot cross.
    A unit's output can cross the next call, as a stage that begins there receives it. Other values that were computed
    in a unit or drawn at random cannot. A result of the model's own code can cross as far as all of its arguments.
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
        """Note that the call of a unit begins."""
        if random.getstate() != self._python:
            raise DataDependent
        self.call, self.inside = self.call + 1, True

    def leave(self, output: Any) -> None:
        """Note that the call of a unit has returned `output`."""
        self.inside, self._python = False, random.getstate()
        if isinstance(_first_element(output), Tensor):
            self._end[_first_element(output)] = self.call + 2


def unit_calls(model: nn.Module, units: Sequence[str], inputs: Mapping[str, Any], *, training: bool) -> list[UnitCall]:
    """The calls of `units` in one forward pass, in order.

    Raises:
        DataDependent: the calls depend on values.
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
    """Units at which a stage can begin.

    Such a unit is called once. Its input is the output of the previously called unit, and the only earlier value that
    it and later code use.
    """
    called = [v.unit for v in seen]
    good = []
    for before, after in pairwise(seen):
        once = called.count(after.unit) == called.count(before.unit) == 1
        if once and not after.crossed and after.input is not None and after.input is _first_element(before.output):
            good.append(after.unit)
    return good


class _Stub(nn.Module):
    """Replaces a unit: has the unit's plain attributes (`attention_type`, ...), but none of its tensors."""

    def __init__(self, unit: nn.Module, stub_input: StubInput) -> None:
        super().__init__()
        mine = self.__dict__.keys() | {"forward"}  # a split unit has `forward` as an attribute
        known = {k: v for k, v in unit.__dict__.items() if not k.startswith("_") and k not in mine}
        hollow = {
            name: torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)  # one element of memory
            for name, p in unit.named_parameters(recurse=False)
        }
        self.__dict__.update({**known, **hollow, "_stub_input": stub_input, "_kind": type(unit)})

    def __getattr__(self, name: str) -> Any:
        """The stub's `forward`, in place of any method of the unit."""
        return self.forward if callable(getattr(self.__dict__["_kind"], name, None)) else super().__getattr__(name)


class EarlierStub(_Stub):
    """Replaces a unit of an earlier stage."""

    def __init__(self, unit: nn.Module, stub_input: StubInput, output: Any) -> None:
        super().__init__(unit, stub_input)
        self._more = len(output) - 1 if isinstance(output, tuple | list) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The received tensor, in the structure of the unit's output."""
        value = self.__dict__["_stub_input"].value
        return value if self._more is None else (value, *[None] * self._more)


class LaterStub(_Stub):
    """Replaces a unit of a later stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """End the forward pass, with the first tensor argument as the stage's output."""
        value = _first(args, kwargs)
        assert value is not None
        raise _StageOutput(value)


def with_stubs(model: nn.Module, stubs: Mapping[str, nn.Module]) -> nn.Module:
    """`model` with stubs. Ancestors of stubs are copied; all other modules are the model's own."""

    def copied(module: nn.Module, path: str) -> nn.Module:
        if path in stubs:
            return stubs[path]
        prefix = f"{path}." if path else ""
        if not any(name.startswith(prefix) for name in stubs):
            return module
        new = copy.copy(module)
        new.__dict__ = dict(module.__dict__)
        new.__dict__["_modules"] = {k: m and copied(m, prefix + k) for k, m in module._modules.items()}
        return new

    return copied(model, "")


def stage_body(model: nn.Module, seen: Sequence[UnitCall], own: Collection[str], stub_input: StubInput) -> nn.Module:
    """The model with stubs for all units but `own`."""
    order = list(dict.fromkeys(v.unit for v in seen))
    first = min(order.index(u) for u in own)
    output = {v.unit: v.output for v in seen}
    stubs: dict[str, nn.Module] = {}
    for place, unit in enumerate(order):
        module = model.get_submodule(unit)
        if unit not in own:
            stubs[unit] = (
                EarlierStub(module, stub_input, output[unit]) if place < first else LaterStub(module, stub_input)
            )
        elif place == first:
            module.register_forward_pre_hook(stub_input.on_first_unit)
    return with_stubs(model, stubs)


@dataclass(frozen=True)
class StubRun:
    """Computes one stage: its output tensor, or the model's output on the last stage.

    Args:
        body: the result of `stage_body` with `stub_input`.
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
        """See `Stage.begin_with`: before its first unit, the model's code repeats computations of earlier stages."""
        self.stub_input.begin = act


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _first(args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    return next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)


def _first_element(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) and output else output
