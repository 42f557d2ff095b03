"""Waits for the weights of each module right before its forward pass, while later weights are still in flight.

Jayarajan et al. 2019, "Priority-based parameter propagation for distributed DNN training": the weights that the forward
pass needs first are sent first, and the first modules wait for no other weights.

    apply ─► enter ─► embed: wait for its weights ─► layer 1: wait for its weights ─► ... ─► backward
                                                       └ and for those that it used in the first step without calling
                                                         their module, as nn.MultiheadAttention does with its out_proj

A weight is requested by the module that owns it. Another module may use the weight earlier. The first step, in which no
weights are in flight, finds such modules by recording the arguments of torch functions. If a later step uses a weight
that no module has requested, its gradient raises an error.
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
    """Requests the weights of one model module by module, from its second step on; `close` removes its hooks.

    Args:
        names: the names of the parameters that may be in flight, by the parameters' ids.
        need: waits for parameters; see `BoundSynchronizer.wait_parameters`.
    """

    def __init__(self, model: nn.Module, names: Mapping[int, str], need: Need) -> None:
        self._names, self._need = names, need
        self._requested: set[str] = set()
        self._before_modules: set[str] = set()  # requested when the forward pass begins
        self._current = self._before_modules
        self._recording: list[_ParameterUseMode] = []
        self._recorded = self._complete = False
        self._hooks: list[RemovableHandle] = []
        for module in model.modules():
            own = {names[id(p)] for p in module.parameters(recurse=False) if id(p) in names}
            if own:  # this hook runs before hooks that compute a weight from other weights
                self._hooks += before_forward([module], partial(self._request, own), prepend=True)
        self._recording_hooks = [
            *before_forward([model], self._start_recording, prepend=True),
            model.register_forward_hook(Attached(lambda *_: self._stop_recording()), always_call=True),
        ]

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Whether all modules of `model` accept hooks."""
        return not any(isinstance(module, jit.ScriptModule) for module in model.modules())

    def applied(self) -> None:
        """Called when the optimizer's step was taken: new weights are in flight."""
        self._requested.clear()
        if self._recorded and not self._complete:
            self._complete = True
            _remove(self._recording_hooks)
        self._need(() if self._complete else None)

    def enter(self) -> None:
        """Called when a forward pass begins."""
        self._request(self._before_modules)

    def came(self, name: str) -> None:
        """Called when the gradient of parameter `name` was computed.

        Raises:
            UnisonoError: no module requested the parameter, so it may have been used before its new weights arrived.
        """
        if name in self._requested:
            return
        if self._complete:
            raise UnisonoError(
                f"{name} has a gradient, but its module was not called: the first step used it in another way or not "
                "at all, so no module has waited for its new weights. Call its module, or set overlap=False, which "
                "waits for all weights before each step"
            )
        self._before_modules.add(name)
        self._requested.add(name)

    def close(self) -> None:
        """Remove all hooks from the model."""
        _remove([*self._hooks, *self._recording_hooks])

    def _request(self, own: set[str]) -> None:
        self._current = own
        if not own <= self._requested:
            self._requested |= own
            self._need(own)

    # The following methods run in the first step only.

    def _start_recording(self) -> None:
        self._recording.append(_ParameterUseMode(self._used))
        self._recording[-1].__enter__()  # type: ignore[no-untyped-call]

    def _stop_recording(self) -> None:
        self._recording.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._recorded = True

    def _used(self, tensor: Tensor) -> None:
        """Assign a parameter that was not requested yet to the module whose forward pass began last."""
        name = self._names.get(id(tensor))
        if name is not None and name not in self._requested:
            self._current.add(name)
            self._requested.add(name)


class _ParameterUseMode(TorchFunctionMode):
    """Calls ``see(tensor)`` for every tensor argument of a torch function, except reads of its attributes."""

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
