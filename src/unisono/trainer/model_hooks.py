"""Adds hooks to a user's model that copies of the model do not have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import jit, nn
from torch.utils.hooks import RemovableHandle


class Attached:
    """A forward hook that calls `act` with its arguments. In a pickled or deep copy of the model it does nothing."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self._act = act

    def __call__(self, *arguments: Any) -> None:
        self._act(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of the standard library that does nothing: a process without this package can load the copy.
        return getattr, (contextlib.nullcontext(), "__exit__")


def before_forward(
    modules: Iterable[nn.Module], act: Callable[[], Any], *, prepend: bool = False
) -> list[RemovableHandle]:
    """Call `act` before each forward pass of `modules`, but not in a transform, nor of those that accept no hooks."""
    hookable = [module for module in modules if not isinstance(module, jit.ScriptModule)]
    hook = Attached(lambda *_: None if in_transform() else act())
    return [module.register_forward_pre_hook(hook, prepend=prepend) for module in hookable]


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` runs, such as ``grad`` or ``vmap``, whose tensors have no memory."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
