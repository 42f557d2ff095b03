"""Adds hooks to a user's model that copies of the model do not have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

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
    """Call `act` before each forward pass of `modules`, except those that accept no hooks."""
    hookable = [module for module in modules if not isinstance(module, jit.ScriptModule)]
    return [module.register_forward_pre_hook(Attached(lambda *_: act()), prepend=prepend) for module in hookable]
