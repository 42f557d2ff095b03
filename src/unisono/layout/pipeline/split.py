"""Splits a model into the stages of a pipeline, without changing the model."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unisono.errors import InvalidInput
from unisono.layout.pipeline import stub_modules as stubs
from unisono.layout.pipeline.chain_units import opened_modules, unit_names
from unisono.layout.pipeline.fx_graph import Chain, Division, Untraceable, trace
from unisono.layout.pipeline.preserved_state import preserved_state
from unisono.layout.pipeline.stage import Inputs, Stage, by_name
from unisono.layout.pipeline.stage_balance import balance_workers, sums
from unisono.layout.shape_propagation import PropagateShapes

CURE = 'name the cuts (cuts=("blocks.4",)), write the model as nn.Sequential, or use pipeline=1'


@dataclass(frozen=True)
class Stages:
    """A whole model, split into stages.

    Args:
        modules: the stages, in order.
        cuts: for each stage but the first, the module at which it begins.
        tied: global names of parameters that more than one stage holds, and these stages.
        units: the units of all stages, in order.
        shares: each stage's fraction of the total cost, if cuts were balanced by costs; else empty.
    """

    modules: tuple[Stage, ...]
    cuts: tuple[str, ...]
    tied: Mapping[str, tuple[int, ...]]
    units: tuple[str, ...]
    shares: tuple[float, ...] = ()

    def __call__(self, inputs: Inputs) -> Any:
        """The whole model's output, computed stage by stage in this process."""
        named = by_name(self.modules[0].call_signature, inputs)
        values: tuple[Tensor, ...] = ()
        for stage in self.modules:
            values = stage(*values, **named)
        return self.modules[-1].assemble(values)


@dataclass(frozen=True)
class CutPoints:
    """A model's chain, the points at which it can be cut, and the way to cut it."""

    model: nn.Module
    inputs: Mapping[str, Any]
    names: tuple[str, ...]  # units at which a stage can begin
    units: tuple[str, ...]  # all units with parameters, in the order of their calls
    chain: Chain | None
    unit_calls: tuple[stubs.UnitCall, ...] = ()

    def segments(self) -> list[tuple[str, ...]]:
        """The units between cut points; one segment more than `names`."""
        begins = [0, *(self.units.index(n) for n in self.names), len(self.units)]
        return [self.units[a:b] for a, b in pairwise(begins)]

    def bytes(self) -> list[int]:
        """Bytes of the parameters of each segment."""
        return [sum(_bytes(self.model.get_submodule(u)) for u in segment) for segment in self.segments()]

    def cut(self, cuts: Sequence[str]) -> Stages:
        """The stages of the model if it is cut at these units.

        Raises:
            InvalidInput: the model cannot be cut there, or the stages do not compute what the model computes.
        """
        unknown = [c for c in cuts if c not in self.names]
        if unknown and self.chain is None:
            raise InvalidInput("cuts", unknown[0], f"{_class_name(self.model)} cannot be cut there",
                               f"cut at {_list_names(self.names)}" if self.names else CURE)  # fmt: skip
        try:
            parts = self._graph_stages(cuts) if self.chain else self._stub_stages(cuts)
        except Untraceable as error:
            raise InvalidInput("cuts", ", ".join(cuts), str(error), f"cut at {_list_names(self.names)}") from error
        signature = inspect.signature(self.model.forward)
        aliases = _aliases(self.model)
        modules = tuple(
            Stage(body, run, place == len(cuts), signature, aliases) for place, (body, run) in enumerate(parts)
        )
        _check_running(self.model, modules, cuts)
        stages = Stages(modules, tuple(cuts), _tied(modules), self.units)
        _verify(self.model, stages, self.inputs)
        return stages

    def _graph_stages(self, cuts: Sequence[str]) -> list[tuple[nn.Module, Any]]:
        assert self.chain is not None
        division = Division(self.chain, cuts)
        bodies = [division.stage_graph(stage) for stage in range(division.count)]
        _adopt(self.model, bodies)
        return [(body, partial(_call, body)) for body in bodies]

    def _stub_stages(self, cuts: Sequence[str]) -> list[tuple[nn.Module, Any]]:
        begins = [0, *(self.units.index(c) for c in cuts), len(self.units)]
        parts = []
        for begin, end in pairwise(begins):
            stub_input = stubs.StubInput()
            body = stubs.stage_body(self.model, self.unit_calls, self.units[begin:end], stub_input)
            parts.append((body, stubs.StubRun(body, stub_input)))
        return parts


def cut_points(model: nn.Module, sample: Inputs, cuts: Sequence[str] = (), segments: int = 2) -> CutPoints:
    """The points at which the model can be cut, found by structure and by one run on the sample.

    The ways to cut it, in order of preference: a graph of its code, cut where one tensor passes; stub modules, with
    which the code runs unchanged; a graph that is valid for the sample's sizes only; cuts that several tensors cross.

    Args:
        model: may be on the meta device; the sample has values even then.
        sample: inputs of one micro-batch.
        cuts: modules that must be units.
        segments: the wanted number of segments; if a way gives fewer, the next way is tried.

    Raises:
        InvalidInput: a cut names no module, or the model's chain cannot be found.
    """
    modules = dict(model.named_modules())
    for cut in cuts:
        if cut not in modules:
            raise InvalidInput("cuts", cut, f"{_class_name(model)} has no module of that name",
                               f"cut at {_list_names(unit_names(model, opened_modules(model))[1:])}")  # fmt: skip
    inputs = by_name(inspect.signature(model.forward), sample)
    opened = opened_modules(model, cuts)
    with preserved_state(model, training=False), PropagateShapes():
        try:
            chain = trace(model, opened, inputs)
        except Untraceable as error:
            try:
                return _by_stubs(model, inputs, opened)
            except Untraceable as other:
                raise InvalidInput("pipeline", _class_name(model), f"no cut point was found: {error}; {other}",
                                   CURE) from error  # fmt: skip
        if chain.conditional:
            with suppress(Untraceable):
                by_stubs = _by_stubs(model, inputs, opened)
                if set(cuts) <= set(by_stubs.names) and (cuts or len(by_stubs.names) >= segments - 1):
                    return by_stubs
    widths = {unit: _width(chain, unit) for unit in chain.units[1:]}
    names = tuple(unit for unit, width in widths.items() if width == 1)
    if len(names) < segments - 1:
        names = tuple(unit for unit, width in widths.items() if width)
    return CutPoints(model, inputs, names, tuple(chain.units), chain)


def split(
    model: nn.Module,
    sample: Inputs,
    stages: int,
    cuts: Sequence[str] | None = None,
    costs: Sequence[float] | None = None,
    limit: int | None = None,
    holders: Sequence[int] | None = None,
) -> Stages:
    """The model cut into `stages`, at `cuts` if given, else so that workers have nearly equal costs.

    Args:
        model: the model. The stages hold its own modules; nothing is copied.
        sample: inputs of one micro-batch, on the model's device unless that is meta.
        stages: the number of stages.
        cuts: the modules at which stages 1, 2, ... begin.
        costs: the cost of each segment of ``cut_points(model, sample, (), stages)``, for instance seconds by
            `measure_segments`; the same on all workers. If None, or if their number is not that of the segments: bytes
            of parameters.
        limit: the most bytes of parameters that a stage may have.
        holders: the worker of each stage; default: one stage per worker.

    Raises:
        InvalidInput: the model cannot be cut in this way.
    """
    if cuts is not None and len(cuts) != stages - 1:
        raise InvalidInput("cuts", tuple(cuts), f"{len(cuts)} cuts make {len(cuts) + 1} stages, not {stages}",
                           f"name {stages - 1} modules")  # fmt: skip
    found = cut_points(model, sample, cuts or (), stages)
    if cuts is None:
        weight = found.bytes()
        costs = costs if costs is not None and len(costs) == len(weight) else weight
        begins = balance_workers(costs, weight, holders or range(stages), limit)
        cuts = [found.names[b - 1] for b in begins]
        return replace(found.cut(cuts), shares=tuple(part / (sum(costs) or 1) for part in sums(costs, begins)))
    return found.cut(cuts)


def _by_stubs(model: nn.Module, inputs: Mapping[str, Any], inner: set[str]) -> CutPoints:
    try:
        seen, in_training = (
            stubs.unit_calls(model, unit_names(model, inner), inputs, training=training) for training in (False, True)
        )
    except stubs.DataDependent:
        raise Untraceable("its control flow depends on values that it computes or draws at random") from None
    except Exception as error:
        raise Untraceable(f"the sample does not run through it: {error}") from error
    also = set(stubs.stub_cut_points(in_training))
    names = tuple(name for name in stubs.stub_cut_points(seen) if name in also)
    if not names:
        raise Untraceable("no block passes one tensor, and nothing else, to the blocks after it")
    return CutPoints(model, inputs, names, tuple(dict.fromkeys(visit.unit for visit in seen)), None, tuple(seen))


def _adopt(model: nn.Module, bodies: Sequence[nn.Module]) -> None:
    """Add the tensors that no stage uses to the first stage, so that the state is complete."""
    held = {name for body in bodies for name in body.state_dict(keep_vars=True)}
    for path, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            for leaf, tensor in getattr(module, kind).items():
                if tensor is not None and f"{path}.{leaf}".lstrip(".") not in held:
                    getattr(_place(bodies[0], path), kind)[leaf] = tensor


def _place(body: nn.Module, path: str) -> nn.Module:
    """The module of that name in `body`, created if missing."""
    for step in filter(None, path.split(".")):
        if body._modules.get(step) is None:
            body.add_module(step, nn.Module())
        child = body._modules[step]
        assert child is not None
        body = child
    return body


def _width(chain: Chain, unit: str) -> int:
    """The number of tensors that would cross a cut at `unit`; 0 if it cannot be cut there."""
    try:
        return len(Division(chain, [unit]).crossing[0])
    except Untraceable:
        return 0


def _call(body: nn.Module, values: tuple[Tensor, ...], inputs: Mapping[str, Any]) -> Any:
    return body(*values, **inputs)


def _aliases(model: nn.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        first = {tensor: name for name, tensor in named()}
        found |= {n: first[t] for n, t in named(remove_duplicate=False) if n != first[t]}
    return found


def _tied(modules: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    holders: dict[str, list[int]] = {}
    for place, stage in enumerate(modules):
        for name in stage.whole_names():
            holders.setdefault(name, []).append(place)
    return {name: tuple(places) for name, places in holders.items() if len(places) > 1}


def _check_running(model: nn.Module, modules: Sequence[Stage], cuts: Sequence[str]) -> None:
    """Refuse running statistics in several stages: only one worker that makes all calls can update them in order."""
    holders = Counter(id(buffer) for stage in modules for buffer in stage.buffers())
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean") and holders[id(buffer)] > 1:
            raise InvalidInput("cuts", ", ".join(cuts), f"several stages would update running statistics of "
                               f"{name}", "cut so that all calls of that layer are in one stage")  # fmt: skip


def _verify(model: nn.Module, stages: Stages, inputs: Mapping[str, Any]) -> None:
    with preserved_state(model, *stages.modules, training=False), PropagateShapes(), torch.no_grad():
        try:
            whole, parts = model(**inputs), stages(inputs)
        except Exception as error:
            problem = f"the stages of {_class_name(model)} do not run: {error}"
            raise InvalidInput("cuts", ", ".join(stages.cuts), problem, CURE) from error
    pairs = list(zip(tree_leaves(whole), tree_leaves(parts), strict=True))
    if not all(_same(a, b) for a, b in pairs):
        problem = f"the stages of {_class_name(model)} do not compute what the whole model computes"
        raise InvalidInput("cuts", ", ".join(stages.cuts), problem, CURE)


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return not isinstance(b, Tensor)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.device.type == "meta" or bool(torch.isclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True).all())


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _class_name(model: nn.Module) -> str:
    return type(model).__name__


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
