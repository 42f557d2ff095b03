"""Models that are built without memory first, and then, tensor by tensor, get the bits of an ordinary build."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.parameter import UninitializedParameter

from unisono.errors import InvalidInput
from unisono.layout.deferred.dispatch_modes import recording
from unisono.layout.deferred.recorder import TapeRecorder
from unisono.layout.deferred.replay import replay
from unisono.layout.deferred.tape import TensorView
from unisono.layout.deferred.tensor_slots import (
    Slots,
    as_parameter_like,
    empty_on_meta,
    named_tensors,
    unregistered_tensors,
)

Keep = Callable[[str, Tensor], Tensor | None]


class DeferredModel(ABC):
    """A model whose parameters and buffers are on the meta device until they are materialized.

    Args:
        model: the user's module; shapes, dtypes, strides and ties are those of an ordinary build.
        why: why the build could not be deferred; empty if it could.
    """

    def __init__(self, model: nn.Module, why: str = "") -> None:
        self.model, self.why = model, why

    @property
    def whole(self) -> bool:
        """Whether the model was built at once, and is in memory until it is materialized."""
        return bool(self.why)

    @abstractmethod
    def materialize(self, keep: Keep) -> dict[str, Tensor]:
        """Compute one parameter or buffer after the other, and return what `keep` returns for each.

        The global generator ends in the state of an ordinary build. Tensors that modules hold besides parameters and
        buffers get their values in place.

        Args:
            keep: ``keep(name, whole)`` is called once for every parameter and buffer, in no particular order, with its
                values. A tied tensor comes under its first name. Returns what to keep, or None. `keep` must not draw
                random numbers. `whole` is freed after the call, unless all of it is returned.

        Returns:
            What was kept, by name, in the model's order.
        """


def record(build: Callable[[], nn.Module]) -> DeferredModel:
    """Run `build` without memory for its tensors.

    Afterwards torch's global generator has the state from before. If the build cannot be deferred, `build` is called
    again, on real memory, with the same random states.

    Raises:
        InvalidInput: what `build` returns is not a module, or has parameters without values.
        Exception: whatever `build` raises.
    """
    recorder = TapeRecorder()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with recording(recorder):
            model = _checked(build())
        if not recorder.refusal:
            return _RecordedModel(model, recorder)
    except InvalidInput:
        raise
    except Exception as error:
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        why = recorder.refusal or f"building it without memory failed ({first_line})"
    else:
        why = recorder.refusal
    random.setstate(python)
    np.random.set_state(numpy)
    before = torch.get_rng_state()
    model = _checked(build())
    end = torch.get_rng_state()
    torch.set_rng_state(before)
    return _MaterializedModel(model, why, end)


class _RecordedModel(DeferredModel):
    """A model whose values exist only as a tape of the operations that compute them."""

    def __init__(self, model: nn.Module, recorder: TapeRecorder) -> None:
        super().__init__(model)
        self._tape, self._ends = recorder.tape, recorder.ends
        slots = Slots(model)
        for _, tensor in list(named_tensors(model)):
            if recorder.view_of(tensor) is None:
                slots.replace(tensor, recorder.meta_placeholder(tensor, outside=True))
        self._as_views = {name: _view_of(recorder, tensor) for name, tensor in named_tensors(model)}
        taken = {_view_of(recorder, parameter).storage for parameter in model.parameters()}
        self._unregistered: list[tuple[Any, Any, Tensor, TensorView]] = []
        for holder, key, tensor in unregistered_tensors(model):
            place = recorder.view_of(tensor)
            if place is not None and place.storage in taken:
                recorder.refuse(f"an attribute {key} shares memory with a parameter")
            if place is not None:
                self._unregistered.append((holder, key, tensor, place))

    def materialize(self, keep: Keep) -> dict[str, Tensor]:
        names, attributes = defaultdict(list), defaultdict(list)
        for name, place in self._as_views.items():
            names[place.storage].append(name)
        for found in self._unregistered:
            attributes[found[-1].storage].append(found)
        kept: dict[str, Tensor] = {}

        def release(number: int, storage: UntypedStorage) -> None:
            for name in names[number]:
                _keep(kept, name, self._as_views[name].on(storage), keep)
            for holder, key, tensor, place in attributes[number]:
                holder[key] = as_parameter_like(tensor, place.on(storage))

        replay(self._tape, names.keys() | attributes.keys(), self._ends, release)
        return {name: kept[name] for name in self._as_views if name in kept}


class _MaterializedModel(DeferredModel):
    """A model that was built in memory, as its construction could not be deferred."""

    def __init__(self, model: nn.Module, why: str, end: Tensor) -> None:
        super().__init__(model, why)
        self._end = end
        for name, tensor in named_tensors(model):
            if tensor.is_meta:
                problem = "it is on the meta device after the build, so it has no values"
                raise InvalidInput("model", name, problem, "build it on the CPU; the build is deferred in any case")

    def materialize(self, keep: Keep) -> dict[str, Tensor]:
        slots, kept = Slots(self.model), dict[str, Tensor]()
        waiting = list(named_tensors(self.model))[::-1]
        while waiting:
            name, tensor = waiting.pop()
            _keep(kept, name, tensor.detach(), keep)
            slots.replace(tensor, empty_on_meta(tensor))
        torch.set_rng_state(self._end)
        return kept


def _keep(kept: dict[str, Tensor], name: str, whole: Tensor, keep: Keep) -> None:
    with torch.no_grad():
        part = keep(name, whole)
        if part is not None:
            alias = part.untyped_storage()._cdata == whole.untyped_storage()._cdata
            kept[name] = part.clone() if alias and part.numel() < whole.numel() else part


def _checked(built: object) -> nn.Module:
    if not isinstance(built, nn.Module):
        raise InvalidInput("model", built, "not a torch.nn.Module", "pass a function that returns one")
    model: nn.Module = built
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            problem = "its shape is not known before the model has seen a batch"
            raise InvalidInput("model", name, problem, "use a module with given sizes instead of a lazy module")
    return model


def _view_of(recorder: TapeRecorder, tensor: Tensor) -> TensorView:
    place = recorder.view_of(tensor)
    assert place is not None
    return place
