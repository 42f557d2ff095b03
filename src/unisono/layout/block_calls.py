"""Finds out, with a run on a sample, how a forward pass uses the blocks of a model."""

from __future__ import annotations

import logging
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unisono.layout.pipeline.preserved_state import preserved_state
from unisono.layout.sample_batch import Sample
from unisono.layout.shape_propagation import PropagateShapes
from unisono.layout.stage_split import inputs_on

LOG = logging.getLogger("unisono")
_DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(frozen=True)
class BlockCalls:
    """How one forward pass used blocks.

    Attributes:
        order: all blocks in the order of their first calls. A block that was not called follows its predecessor in the
            model. If the pass failed, such blocks follow all called ones.
        called: the blocks that were called.
        used_outside: blocks whose parameters are not used in exactly one call per pass and nowhere else; with the
            reason.
        may_vary: whether other data may lead to other calls: in evaluation or training mode, the code read values, drew
            random numbers outside of torch, or failed.
    """

    order: tuple[nn.Module, ...]
    called: frozenset[nn.Module]
    used_outside: Mapping[nn.Module, str]
    may_vary: bool


def trace_calls(model: nn.Module, blocks: Sequence[nn.Module], sample: Sample) -> BlockCalls:
    """Run `model` on `sample`, and record how it calls `blocks`.

    On the meta device only the inputs have values, so the run ends where the code reads a computed value. A second run,
    in training mode, only finds out whether the code reads values there.
    """
    blocks = list(dict.fromkeys(blocks))
    seen, ended = _run(model, blocks, sample, training=False)
    for block, count in seen.called.items():
        if count > 1:
            seen.used_outside.setdefault(block, f"it is called {count} times")
    vary = not ended or seen.reads_values or _varies_in_training(model, blocks, sample)
    return BlockCalls(tuple(_ordered(blocks, seen.called, ended)), frozenset(seen.called), seen.used_outside, vary)


def _varies_in_training(model: nn.Module, blocks: Sequence[nn.Module], sample: Sample) -> bool:
    seen, ended = _run(model, blocks, sample, training=True)
    return not ended or seen.reads_values


def _run(model: nn.Module, blocks: Sequence[nn.Module], sample: Sample, *, training: bool) -> tuple[_CallTracer, bool]:
    """The trace of a pass, and whether it finished."""
    seen = _CallTracer(model, blocks)
    try:
        with _traced(model, blocks, seen, training):
            drawn = random.getstate()
            sample.forward(model, inputs_on(model, sample.batch))
            seen.reads_values = seen.reads_values or random.getstate() != drawn
    except Exception as error:  # the model may raise anything on tensors without values
        LOG.debug("a trace of the calls of blocks failed: %s", error)
        return seen, False
    return seen, True


class _CallTracer(TorchDispatchMode):
    """Records the blocks whose parameters are used while the block is not being called.

    Attributes:
        reads_values: whether the code has read values of tensors.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside: list[nn.Module] = []
        self.called: Counter[nn.Module] = Counter()
        self.used_outside: dict[nn.Module, str] = {}
        self.reads_values = False
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._owners = _owners(model, blocks)
        for parameter, owners in self._owners.items():
            if len(owners) > 1:
                self._mark_used_outside(owners, f"it shares {self._names[parameter]}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads_values = self.reads_values or not _DATA_DEPENDENT.isdisjoint(func.tags)
        for x in tree_leaves((args, kwargs)):
            owners = self._owners.get(id(x), set())
            if owners and not owners & set(self.inside):
                self._mark_used_outside(owners, f"{self._names[id(x)]} is used outside of its calls")
        return func(*args, **(kwargs or {}))

    def _mark_used_outside(self, owners: set[nn.Module | None], why: str) -> None:
        for block in owners:
            if block is not None:
                self.used_outside.setdefault(block, why)


def _owners(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[int, set[nn.Module | None]]:
    """The blocks that hold each parameter, by its id; None stands for the rest of the model."""
    found: dict[int, set[nn.Module | None]] = defaultdict(set)
    home = {module: block for block in blocks for module in block.modules()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            found[id(parameter)].add(home.get(module))
    return {parameter: owners for parameter, owners in found.items() if owners != {None}}


class _HostReads(TorchFunctionMode):
    """Records that code reads values by functions that call no operator of torch."""

    def __init__(self, seen: _CallTracer) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._seen.reads_values = self._seen.reads_values or func in (Tensor.tolist, Tensor.numpy)
        return func(*args, **(kwargs or {}))


@contextmanager
def _traced(model: nn.Module, blocks: Sequence[nn.Module], seen: _CallTracer, training: bool) -> Iterator[None]:
    def enter(block: nn.Module, _: Any) -> None:
        seen.inside.append(block)
        seen.called[block] += 1

    def leave(*_: Any) -> None:
        seen.inside.pop()

    with ExitStack() as stack:
        stack.enter_context(preserved_state(model, training=training))
        stack.enter_context(torch.no_grad())
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(enter).remove)
            stack.callback(block.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(PropagateShapes())
        stack.enter_context(seen)
        stack.enter_context(_HostReads(seen))
        yield


def _ordered(blocks: Sequence[nn.Module], called: Mapping[nn.Module, int], ended: bool) -> list[nn.Module]:
    order = list(called)
    for place, block in enumerate(blocks):
        if block not in called:
            behind = order.index(blocks[place - 1]) + 1 if place else 0
            order.insert(behind if ended else len(order), block)
    return order
