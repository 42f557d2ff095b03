"""Hooks on a user's model that its copies do not have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from torch import jit, nn
from torch.utils.hooks import RemovableHandle


class Attached:
    """A forward hook that calls `act` with what it is called with. In a pickled or deep copy of the model it does
    nothing."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self._act = act

    def __call__(self, *given: Any) -> None:
        self._act(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of Python's own that does nothing: whoever loads the copy need not have this package.
        return getattr, (contextlib.nullcontext(), "__exit__")


def before_forward(
    modules: Iterable[nn.Module], act: Callable[[], Any], *, prepend: bool = False
) -> list[RemovableHandle]:
    """Have `act` called before each forward pass of `modules`, but for those that take no hooks."""
    takes = [module for module in modules if not isinstance(module, jit.ScriptModule)]
    return [module.register_forward_pre_hook(Attached(lambda *_: act()), prepend=prepend) for module in takes]
