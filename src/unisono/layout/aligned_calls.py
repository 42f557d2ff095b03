"""Forward and backward passes in which every rank calls or skips each sharded block once, in the same order.

Ranks gather a block's parameters collectively and sum its gradients collectively, so no rank may leave a block out. A
rank whose code does not call a block (a layer dropped at random, an expert that none of its tokens chose) skips it: it
gathers the parameters and computes nothing.

    forward    a zero ─► embedding ─► block 0 ─► block 1, skipped ─► block 2 ─► head ─► + loss
    backward              fill ◄────── fill ◄────── fill ◄───────────  fill ◄─────────────┘

A scalar zero passes through all blocks next to the activations and is added to the loss. So backward reaches every
block, in reverse order. After the backward pass of a block, its parameters without a gradient get zeros, so that all
ranks sum tensors of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from unisono.errors import InvalidInput
from unisono.layout.call_agreement import gather_all

ExchangeGroups = Callable[[nn.Module], Sequence[dist.ProcessGroup]]
_ZERO = "_zero"  # the keyword that carries the zero through torch's hooks
_CURE = "call it once in every pass, or keep it outside of ModuleList and Sequential"


@dataclass
class BlockGradients:
    """Which parameters of a sharded module got gradients on this rank since `clear`.

    Args:
        slots: for each parameter its name, and the module and attribute that hold it, whether sharded or not.
    """

    slots: Sequence[tuple[str, nn.Module, str]]
    used: set[str] = field(default_factory=set)
    _filled: dict[str, tuple[Tensor, int]] = field(default_factory=dict)

    def fill(self) -> None:
        """After the module's backward pass: give zeros to its parameters without a gradient, and record the others."""
        for name, module, attribute in self.slots:
            parameter = module._parameters[attribute]
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                self._filled[name] = parameter.grad, _version(parameter.grad)
            elif not self._is_as_filled(name, parameter.grad):
                self.used.add(name)

    def clear(self) -> None:
        """Begin a new step, in which no parameter has a gradient yet."""
        self.used.clear()
        self._filled.clear()

    def _is_as_filled(self, name: str, gradient: Tensor) -> bool:
        zeros, version = self._filled.get(name, (None, 0))
        return gradient is zeros and _version(gradient) == version


def _in_backward() -> bool:
    task: int = torch._C._current_graph_task_id()
    return task != -1


def _version(tensor: Any) -> int:
    """The number of in-place writes to `tensor`, or to this rank's part of it."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local._version


class _Fill(torch.autograd.Function):
    """The identity function on the zero; its backward pass calls ``gradients.fill()``."""

    @staticmethod
    def forward(ctx: Any, zero: Tensor, gradients: BlockGradients) -> Tensor:
        ctx.gradients = gradients
        return zero.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        ctx.gradients.fill()
        return incoming[0], None


class _OutputAndZero(NamedTuple):
    """A module's output, and the zero that accompanies it."""

    value: Any
    zero: Tensor | None


@dataclass
class _ForwardPass:
    """A forward pass in progress: its zero, which is None if no backward pass follows, and the next block's index."""

    zero: Tensor | None
    next_block: int = 0


class AlignedCalls:
    """Aligns one rank's passes through `root` with those of the other ranks, block by block.

    The caller shards `root` and each of its blocks within `hooks_around`.

    Args:
        layout: the user's layout, for messages.
        order: names and modules of the blocks, in the order in which every rank calls or skips them.
        gradients: the `BlockGradients` of each block and of `root`.
        device: the device that computes.
        exchange_groups: returns, for a block, the groups whose ranks communicate inside it too. Either all ranks of
            such a group call the block, or none.
    """

    def __init__(
        self,
        root: nn.Module,
        layout: str,
        order: Sequence[tuple[str, nn.Module]],
        gradients: dict[nn.Module, BlockGradients],
        device: torch.device,
        exchange_groups: ExchangeGroups,
    ) -> None:
        self._root, self._layout, self._order = root, layout, order
        self._device, self._exchange_groups = device, exchange_groups
        self.gradients = gradients
        self._positions = {block: place for place, (_, block) in enumerate(order)}
        self._pass: _ForwardPass | None = None
        self._zero: Tensor | None = None

    @contextmanager
    def hooks_around(self, module: nn.Module) -> Iterator[None]:
        """A context in which the caller shards `module`, with hooks that run before and after those of torch.

        They show the zero, as an argument and a result, to torch's hooks alone: user hooks never see it.
        """
        module.register_forward_pre_hook(self._after_unshard, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._before_reshard)
        yield
        module.register_forward_pre_hook(self._before_unshard, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after_reshard)
        if module is not self._root:
            block: Any = module
            block.forward_skipped = partial(self._with_fill, module)
            register_fsdp_forward_method(module, "forward_skipped")

    def connect(self, value: Tensor) -> Tensor:
        """`value` plus the zero, so that its backward pass reaches every block."""
        zero, self._zero = self._zero, None
        return value if zero is None else value + zero.to(value.dtype)

    def _before_unshard(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module is self._root and not _in_backward():
            requires_grad = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
            self._pass = _ForwardPass(
                torch.zeros((), device=self._device, requires_grad=True) if requires_grad else None
            )
        now = self._current_pass()
        if now is None:
            return None
        if module is not self._root:
            self._call_block(now, module)
        return args, {**kwargs, _ZERO: now.zero if torch.is_grad_enabled() else None}

    def _after_unshard(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if _ZERO not in kwargs:
            return None
        zero = kwargs.pop(_ZERO)
        if zero is not None and self._pass is not None:
            self._pass.zero = self._with_fill(module, zero)
        return args, kwargs

    def _before_reshard(self, module: nn.Module, args: Any, output: Any) -> Any:
        now = self._current_pass()
        if now is None or output is None:
            return None
        if module is self._root:
            self._skip_until(now, len(self._order))
        return _OutputAndZero(output, now.zero.clone() if now.zero is not None and torch.is_grad_enabled() else None)

    def _after_reshard(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, _OutputAndZero):
            return None
        if module is not self._root:
            if self._pass is not None and output.zero is not None:
                self._pass.zero = output.zero
            return output.value
        self._pass, self._zero = None, output.zero
        return output.value if getattr(module, "is_last", True) else self._stage_outputs(output.value)

    def _stage_outputs(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs of a pipeline stage before the last, connected to its blocks, as this rank has no loss."""
        first = next((place for place, value in enumerate(values) if value.requires_grad), None)
        return tuple(self.connect(value) if place == first else value for place, value in enumerate(values))

    def _current_pass(self) -> _ForwardPass | None:
        """The forward pass in progress; None while activations are recomputed in backward."""
        return None if _in_backward() else self._pass

    def _call_block(self, now: _ForwardPass, block: nn.Module) -> None:
        place = self._positions[block]
        name = self._order[place][0]
        if place < now.next_block:
            before = self._order[now.next_block - 1][0]
            problem = f"{name} is called twice" if before == name else f"{name} is called after {before}"
            raise InvalidInput(
                "layout", self._layout, f"{problem} in a forward pass, but was not on the first samples, so workers "
                "cannot gather its parameters together", _CURE)  # fmt: skip
        self._skip_until(now, place)
        self._check_agreement(place, called=True)
        now.next_block = place + 1

    def _skip_until(self, now: _ForwardPass, place: int) -> None:
        for skipped in range(now.next_block, place):
            self._check_agreement(skipped, called=False)
            block: Any = self._order[skipped][1]
            with torch.set_grad_enabled(now.zero is not None):  # even if the user's code disables gradients
                now.zero = block.forward_skipped(now.zero)
        now.next_block = max(now.next_block, place)

    def _with_fill(self, module: nn.Module, zero: Tensor | None) -> Tensor | None:
        return None if zero is None else _Fill.apply(zero, self.gradients[module])  # type: ignore[no-untyped-call]

    def _check_agreement(self, place: int, *, called: bool) -> None:
        for group in self._exchange_groups(self._order[place][1]):
            mine = torch.tensor([float(called)], device=self._device)
            gathered = gather_all(mine, group)
            if gathered is not None and gathered.min() != gathered.max():
                raise self._mismatch(
                    self._order[place][0], gathered.flatten().tolist(), dist.get_process_group_ranks(group)
                )

    def _mismatch(self, name: str, called: Sequence[float], ranks: Sequence[int]) -> InvalidInput:
        callers, others = (
            [str(rank) for rank, yes in zip(ranks, called) if bool(yes) is each] for each in (True, False)
        )
        problem = (
            f"{name} is called by {_list_workers(callers)} and not by {_list_workers(others)}, "
            "and its computation needs all of them"
        )
        return InvalidInput("layout", self._layout, problem, "let all of them call it, or leave the layout out")


def _list_workers(ranks: Sequence[str]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
