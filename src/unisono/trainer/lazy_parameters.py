"""Asks for the weights of each module right before its forward pass, so that the first ones can begin while the others
are still on their way.

Jayarajan et al. 2019, "Priority-based parameter propagation for distributed DNN training": what the forward pass needs
first travels first, and is all that its beginning waits for.

    apply ─► enter ─► embed: wait for its weights ─► layer 1: for its ─► ... ─► backward
                                                       └ and for those that it was seen to use without calling their
                                                         module, as nn.MultiheadAttention does with its out_proj

A weight is asked for by the modules that own it. Some are also used by others before: that is found out in the first
step, for which nothing is on its way, by looking at what torch functions are called with. What changes its ways later
and uses a weight that nobody has asked for is refused when the gradient comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, jit, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from unisono.errors import UnisonoError
from unisono.tensors.batch import tensors
from unisono.trainer.model_hooks import Attached, before_forward

Need = Callable[[Collection[str] | None], None]


class LazyParameters:
    """Of one model, from its second step on; `close` leaves the model as it was.

    Args:
        names: of the parameters that may be on their way, by their ids.
        need: see `BoundSynchronizer.wait_parameters`.
    """

    def __init__(self, model: nn.Module, names: Mapping[int, str], need: Need) -> None:
        self._names, self._need = names, need
        self._asked: set[str] = set()
        self._ahead: set[str] = set()  # asked for before any module begins
        self._latest = self._ahead
        self._watching: list[_ParameterUseMode] = []
        self._watched = self._knows = False
        self._hooks: list[RemovableHandle] = []
        for module in model.modules():
            own = {names[id(p)] for p in module.parameters(recurse=False) if id(p) in names}
            if own:  # before hooks that compute a weight from others
                self._hooks += before_forward([module], partial(self._before, own), prepend=True)
        self._watches = [
            *before_forward([model], self._watch, prepend=True),
            model.register_forward_hook(Attached(lambda *_: self._watch_no_more()), always_call=True),
        ]

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Whether all modules of `model` take hooks."""
        return not any(isinstance(module, jit.ScriptModule) for module in model.modules())

    def applied(self) -> None:
        """A step was taken."""
        self._asked.clear()
        if self._watched and not self._knows:
            self._knows = True
            _remove(self._watches)
        self._need(() if self._knows else None)

    def enter(self) -> None:
        """A forward pass begins."""
        self._before(self._ahead)

    def came(self, name: str) -> None:
        """The gradient of parameter `name` has come.

        Raises:
            UnisonoError: nobody has asked for the parameter, so it may have been used before its weights were here.
        """
        if name in self._asked:
            return
        if self._knows:
            raise UnisonoError(
                f"{name} has a gradient, but its module was not called: in the first step it was used otherwise or not "
                "at all, so nobody has waited for its new weights. Call its module, or set overlap=False, which waits "
                "for all weights before each step"
            )
        self._ahead.add(name)
        self._asked.add(name)

    def close(self) -> None:
        """The model has no hooks any more."""
        _remove([*self._hooks, *self._watches])

    def _before(self, own: set[str]) -> None:
        self._latest = own
        if not own <= self._asked:
            self._asked |= own
            self._need(own)

    # In the first step.

    def _watch(self) -> None:
        self._watching.append(_ParameterUseMode(self._used))
        self._watching[-1].__enter__()  # type: ignore[no-untyped-call]

    def _watch_no_more(self) -> None:
        self._watching.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._watched = True

    def _used(self, tensor: Tensor) -> None:
        """Whoever began last also asks for what nobody has asked for until now."""
        name = self._names.get(id(tensor))
        if name is not None and name not in self._asked:
            self._latest.add(name)
            self._asked.add(name)


class _ParameterUseMode(TorchFunctionMode):
    """Calls ``see(tensor)`` with every tensor that a torch function is given, but to say what it is like."""

    def __init__(self, see: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "__get__" or isinstance(result, Tensor):  # .shape, .dtype, .device ...
            for tensor in tensors((args, kwargs)):
                self._see(tensor)
        return result


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()
