"""Measures the time of each segment of a model's chain, to balance stages.

The model may be on the meta device: one segment at a time gets random weights. Segments with the same operations on the
same shapes are measured once, so that noise cannot make equal blocks unequal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from unisono.layout.pipeline.preserved_state import preserved_state
from unisono.layout.pipeline.rng_states import Generators
from unisono.layout.pipeline.split import CutPoints
from unisono.layout.pipeline.stage import Stage
from unisono.layout.shape_propagation import PropagateShapes

ROUNDS = 2  # over all segments, so that no single busy moment decides
_REPEATS = range(3, 20)  # passes of a segment in a round: at least 3, and up to 20 within _ROUND_SECONDS
_ROUND_SECONDS = 0.05


def measure_segments(
    points: CutPoints,
    inputs: Mapping[str, Any],
    device: torch.device,
    loss: Callable[[Any], Tensor] | None = None,
) -> list[float]:
    """Seconds of forward and backward of each segment, the minimum of several runs; preserves the model's state.

    Times differ between workers: measure on one worker and broadcast.

    Args:
        inputs: the inputs of a micro-batch, by name, on `device`.
        loss: ``loss(output)`` of the model's output; its time counts for the last segment.

    Raises:
        Exception: whatever the model raises in training mode.
    """
    stages = points.cut(points.names).modules
    generators = Generators(device)
    states = generators.states()
    with preserved_state(points.model, *stages, training=True):
        with PropagateShapes():
            received, kinds = _arrivals_and_kinds(stages, points.inputs)
        seconds = dict.fromkeys(kinds, float("inf"))
        for _ in range(ROUNDS):
            for kind in seconds:
                place = kinds.index(kind)
                of_last = loss if stages[place].is_last else None
                spent = _TimedStage(stages[place], received[place], inputs, device, of_last).seconds()
                seconds[kind] = min(seconds[kind], spent)
    generators.restore(states)
    return [seconds[kind] for kind in kinds]


def _arrivals_and_kinds(
    stages: Sequence[Stage], inputs: Mapping[str, Any]
) -> tuple[list[tuple[Tensor, ...]], list[Any]]:
    """The input of each stage, on the model's device, and a key of its work: equal keys cost the same."""
    received, kinds = [], []
    values: tuple[Tensor, ...] = ()
    for stage in stages:
        operations = _OperationLog()
        with operations:
            out = stage(*values, **inputs)
        requires_grad = [p.requires_grad for p in (*values, *stage.parameters())]
        kinds.append((tuple(operations.seen), tuple(requires_grad), stage.is_last))
        received.append(values)
        values = tuple(v.detach().requires_grad_(v.requires_grad) for v in out)
    return received, kinds


class _OperationLog(TorchDispatchMode):
    """Records operators and their shapes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(f"{func} {tree_map(_describe, (args, kwargs or {}))}")
        return func(*args, **(kwargs or {}))


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.stride() if value.layout is torch.strided else ''} {value.dtype}"
    return "" if isinstance(value, torch.device | torch.Generator) else repr(value)


class _TimedStage:
    """Times one stage, with random values for the parameters and inputs that have none."""

    def __init__(
        self,
        stage: Stage,
        received: tuple[Tensor, ...],
        inputs: Mapping[str, Any],
        device: torch.device,
        loss: Callable[[Any], Tensor] | None,
    ) -> None:
        random = torch.Generator(device).manual_seed(0)
        tensors = (*stage.named_parameters(), *stage.named_buffers())
        self._tensors = {name: _filled_like(t, isinstance(t, nn.Parameter), device, random) for name, t in tensors}
        self._arriving = tuple(_filled_like(t, False, device, random) for t in received)
        self._wanted = [t for t in (*self._arriving, *self._tensors.values()) if t.requires_grad]
        self._stage, self._inputs, self._loss, self._device = stage, dict(inputs), loss, device

    def seconds(self) -> float:
        """The seconds of the fastest of several passes, each of forward and backward."""
        best, end = float("inf"), time.perf_counter() + _ROUND_SECONDS
        self._pass()
        for count in range(_REPEATS.stop):
            if count >= _REPEATS.start and time.perf_counter() > end:
                break
            best = min(best, self._pass())
        return best

    def _pass(self) -> float:
        self._wait()
        begin = time.perf_counter()
        out = functional_call(self._stage, self._tensors, self._arriving, self._inputs)
        if self._loss is not None:
            out = (self._loss(self._stage.assemble(out)),)
        requires_grad = [v for v in out if v.requires_grad]
        if requires_grad and self._wanted:
            torch.autograd.grad(
                requires_grad, self._wanted, [torch.ones_like(v) for v in requires_grad], allow_unused=True
            )
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize()


def _filled_like(tensor: Tensor, weight: bool, device: torch.device, random: torch.Generator) -> Tensor:
    """A tensor like `tensor`, with its values or, if it is on the meta device, with random values.

    These have the magnitude of a trained model's values, as overflow and denormals would change the time.
    """
    if not tensor.is_meta:
        made = tensor.detach().to(device, copy=True)
    elif not tensor.is_floating_point():
        made = torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
        made = made if tensor.dtype == torch.bool else made.zero_()
    elif weight and tensor.dim() < 2:
        made = torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        made = torch.randn(tensor.shape, generator=random, device=device).to(tensor.dtype)
        made = made.mul_((tensor.shape[0] / max(1, tensor.numel())) ** 0.5) if weight else made
    return made.requires_grad_(tensor.requires_grad)
