"""Traces one forward pass: the modules called, in order, their arguments, and the users of parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from unisono.errors import InvalidInput
from unisono.layout.shape_propagation import PropagateShapes
from unisono.layout.tensor.materialize import is_meta

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class ForwardTrace:
    """The record of one forward pass.

    Args:
        order: names of the called modules, each once, in the order of their first calls.
        calls: for each called module, by name, the arguments of its first call.
        users: for each parameter, by id, the names of the modules whose code used it.
    """

    order: list[str] = field(default_factory=list)
    calls: dict[str, Call] = field(default_factory=dict)
    users: dict[int, set[str]] = field(default_factory=dict)


def trace_forward(model: nn.Module, sample: tuple[Any, ...] | Mapping[str, Any]) -> ForwardTrace:
    """Run `model` once on `sample`, in evaluation mode and without gradients.

    A model on the meta device can read values of its inputs.

    Raises:
        InvalidInput: the model's code fails; on the meta device, it fails if it reads values that it computes.
    """
    seen = ForwardTrace()
    inside: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = names[module]
        inside.append(name)
        if name not in seen.calls:
            seen.order.append(name)
            seen.calls[name] = snapshot((args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        inside.pop()

    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        for module in names:
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(_Uses(seen.users, inside))
        if is_meta(model):
            stack.enter_context(PropagateShapes())
        call: Call = ((), dict(sample)) if isinstance(sample, Mapping) else (tuple(sample), {})
        args, kwargs = call
        try:
            model(*args, **kwargs)
        except Exception as error:  # the user's code may raise anything
            raise _failed(model, error) from error
    return seen


def _failed(model: nn.Module, error: Exception) -> InvalidInput:
    first_sentence = f"{type(error).__name__}: {str(error).partition(chr(10))[0].partition('. ')[0]}"
    how = "on the meta device, where possible splits are found, its code fails" if is_meta(model) else "its code fails"
    return InvalidInput("tensor", type(model).__name__, f"{how} ({first_sentence})",
                        "do not branch on computed values, or use tensor=1")  # fmt: skip


def snapshot(call: Call) -> Call:
    """`call` with copies of all objects that a forward pass may change: a key-value cache, an input changed in
    place."""
    tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]
    memo: dict[int, Any] = {id(leaf): leaf.clone() if leaf.requires_grad else leaf for leaf in tensors}
    return copy.deepcopy(call, memo)


def differentiable(call: Call) -> Call:
    """`call` with every floating-point tensor as a leaf that requires a gradient."""

    def leaf(x: Any) -> Any:
        wanted = isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().clone().requires_grad_() if wanted else x

    return tree_map(leaf, call)  # type: ignore[no-any-return]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which the model is in evaluation mode."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


class _Uses(TorchFunctionMode):
    def __init__(self, users: dict[int, set[str]], inside: list[str]) -> None:
        super().__init__()
        self.users, self.inside = users, inside

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # attributes such as `.dtype` are not uses
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter):
                    self.users.setdefault(id(leaf), set()).add(self.inside[-1] if self.inside else "")
        return func(*args, **(kwargs or {}))
