"""Tells custom loops of the step of any optimizer of this process.

torch's table of hooks must not change while an optimizer steps. A loop that is garbage-collected meanwhile, or made in
another thread, would change it. So there is one hook for all loops, which stays.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class AnyStep:
    """Calls functions before the step of any optimizer. Methods are called as long as their objects exist."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: tuple[weakref.WeakMethod[Callable[[Optimizer], None]], ...] = ()
        register_optimizer_step_pre_hook(self._before)

    def add(self, method: Callable[[Optimizer], None]) -> None:
        """Call ``method(optimizer)`` from now on."""
        with self._lock:
            alive = (each for each in self._listeners if each() is not None)
            self._listeners = (*alive, weakref.WeakMethod(method))

    def remove(self, method: Callable[[Optimizer], None]) -> None:
        """Call it no more. May be called twice."""
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each() not in (None, method))

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        for each in self._listeners:
            if (method := each()) is not None:
                method(optimizer)


@cache
def any_step() -> AnyStep:
    """That of this process."""
    return AnyStep()
