"""Records a model's construction: operators run on the meta device, and their effects on memory go to a tape."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import _disable_current_modes

from unisono.layout.deferred.operator_traits import Traits, traits
from unisono.layout.deferred.replay import last_draws, replay
from unisono.layout.deferred.rng_draws import GeneratorTracker
from unisono.layout.deferred.tape import Draw, GeometryOnly, Tape, TapeOperation, TensorView, leaves, map_leaves
from unisono.layout.deferred.tensor_slots import empty_on_meta

_SMALL_BYTES = 1 << 16  # contents up to this size are kept after a read, to avoid computing them again
_CPU = torch.device("cpu")


class NotDeferrable(Exception):
    """This build cannot be deferred; the message gives the reason."""


class TapeRecorder:
    """Creates meta placeholders that appear to be on the CPU, and writes a tape of their operations."""

    def __init__(self) -> None:
        self.tape = Tape()
        self.ends: dict[torch.Generator, Tensor | int] = {}
        self.refusal = ""
        self.sharing = False
        self._numbers: dict[int, int] = {}  # numbers of the storages on the tape, by address
        self._external: set[int] = set()  # numbers of placeholders for memory that exists outside of the model
        self._draws = GeneratorTracker()

    def close(self) -> None:
        """Restore the generators after the recording, and keep their final positions in `ends`."""
        self.ends = self._draws.close()

    def refuse(self, why: str) -> NoReturn:
        """Raise `NotDeferrable`, and keep the reason in `refusal`, as the user's code may catch the error."""
        self.refusal = self.refusal or why
        raise NotDeferrable(why)

    def view_of(self, tensor: Tensor) -> TensorView | None:
        """The view of a recorded tensor; None for any other tensor."""
        if tensor.layout is not torch.strided or tensor.device.type != "meta":
            return None
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        return None if number is None else TensorView.of(tensor, number)

    def read(self, *tensors: Tensor) -> list[Tensor]:
        """The current content of placeholders, computed now, outside of all modes."""
        places = [place for tensor in tensors if (place := self.view_of(tensor)) is not None]
        wanted = {place.storage for place in places}
        contents: dict[int, UntypedStorage] = {}
        ends = last_draws(self.tape, wanted)
        states = {generator: generator.get_state() for generator in ends}
        with _disable_current_modes():
            replay(self.tape, wanted, ends, contents.__setitem__)
            for generator, end in ends.items():
                if isinstance(end, int):
                    self.tape.states[end] = generator.get_state()
                generator.set_state(states[generator])
            for number, content in contents.items():
                if content.nbytes() <= _SMALL_BYTES:
                    self.tape.add_content(number, content.clone())
            return [place.on(contents[place.storage]) for place in places]

    def run_operator(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator on the meta device and record it."""
        if operator is torch.ops.aten.lift_fresh.default and args[0].device.type == "cpu":
            return self.meta_placeholder(args[0], outside=self.sharing)
        trait = traits(operator)
        if not trait.strided or kwargs.get("layout") not in (None, torch.strided):
            self.refuse(f"{operator} makes a tensor that is not strided")
        if trait.changes_view:
            return operator(*args, **kwargs)
        self.check_device(kwargs.get("device"))
        args, kwargs = map_leaves(args, self._meta_argument), map_leaves(kwargs, self._meta_argument)
        result = self._infer_result(operator, trait, args, kwargs)
        self._append(operator, trait, args, kwargs, result)
        return result

    def _infer_result(self, operator: Any, trait: Traits, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result on the meta device; computed from real content if the operator depends on it."""
        if not trait.data_dependent:
            on_meta = {key: None if key in ("generator", "pin_memory") else kwargs[key] for key in kwargs}
            if trait.has_device:
                on_meta["device"] = "meta"
            try:
                return operator(*args, **on_meta)
            except (NotImplementedError, RuntimeError) as error:
                if trait.draws:
                    self.refuse(f"{operator} draws random numbers and cannot be deferred: {error}")
        placeholders = list(leaves((args, kwargs), Tensor))
        reals = dict(zip(map(id, placeholders), self.read(*placeholders), strict=True))
        real = lambda value: reals[id(value)] if isinstance(value, Tensor) else value
        here = {"device": _CPU} if trait.has_device else {}
        with torch.no_grad():
            result = operator(*map_leaves(args, real), **map_leaves(kwargs, real) | here)
        known = {id(reals[id(placeholder)]): placeholder for placeholder in placeholders}

        def placeholder_of(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return known[id(value)] if id(value) in known else empty_on_meta(value)

        return map_leaves(result, placeholder_of)

    def _append(self, operator: Any, trait: Traits, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        fresh = tuple(self._new_view(tensor) for tensor in leaves(result, Tensor))
        writes = {place.storage for place in fresh if place is not None}
        reads: set[int] = set()
        for key, value in (*enumerate(args), *kwargs.items()):
            for place in map(self.view_of, leaves(value, Tensor)):
                assert place is not None
                if key in trait.written:
                    writes.add(place.storage)
                if key in trait.written and trait.fills and self._covers(place):
                    continue
                if not (trait.geometry_only and key == 0):
                    reads.add(place.storage)
        if writes & self._external:
            self.refuse(f"{operator} writes to memory outside of the model")
        if not writes and not trait.draws:
            return
        draw = self._draw(kwargs.get("generator")) if trait.draws else None
        args, kwargs = self._as_views(trait, args, kwargs)
        if trait.has_device:
            kwargs["device"] = _CPU
        memory, dtype = (frozenset(reads), frozenset(writes)), torch.get_default_dtype()
        self.tape.add(TapeOperation(operator, args, kwargs, fresh, *memory, draw, dtype))

    def _as_views(self, trait: Traits, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        place = lambda value: self.view_of(value) if isinstance(value, Tensor) else value
        args, kwargs = map_leaves(args, place), map_leaves(kwargs, place)
        if trait.geometry_only and isinstance(args[0], TensorView):
            args = (GeometryOnly(args[0]), *args[1:])
        return args, kwargs

    def _covers(self, place: TensorView) -> bool:
        return place.covers(self.tape.storages[place.storage].nbytes())

    def _draw(self, generator: torch.Generator | None) -> Draw:
        generator = torch.default_generator if generator is None else generator
        if generator.device.type != "cpu":
            self.refuse(f"it draws from a generator on {generator.device}")
        return Draw(generator, self._draws.draw(generator, len(self.tape.operations)))

    def _new_view(self, tensor: Tensor) -> TensorView | None:
        """The view of a tensor in new memory; None in known memory."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._numbers:
            return None
        self._numbers[storage._cdata] = self.tape.add_storage(storage)
        return TensorView.of(tensor, self._numbers[storage._cdata])

    def _meta_argument(self, value: Any) -> Any:
        """The placeholder on the meta device for a tensor argument; any other argument unchanged."""
        if not isinstance(value, Tensor):
            return value
        plain = type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
        if not plain or value.layout is not torch.strided:
            self.refuse(f"it uses a {type(value).__name__} of layout {value.layout}")
        if value.is_conj() or value.is_neg():
            self.refuse("it uses a lazily conjugated or negated tensor")
        if value.device.type == "meta":
            if value.untyped_storage()._cdata not in self._numbers:
                self.refuse("it uses a meta tensor from before the build")
            return value
        self.check_device(value.device)
        return self.meta_placeholder(value, outside=True)

    def meta_placeholder(self, real: Tensor, outside: bool) -> Tensor:
        """The placeholder on the meta device for `real`, whose content is added to the tape.

        If `outside`, the memory exists outside of the model, and a recorded operation that writes to it is refused.
        """
        storage = real.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self.tape.add_storage(UntypedStorage(storage.nbytes(), device="meta"))
            self._numbers[storage._cdata] = self._numbers[self.tape.storages[number]._cdata] = number
            self.tape.add_content(number, storage)
            if outside:
                self._external.add(number)
        return TensorView.of(real, number).on(self.tape.storages[number])

    def check_device(self, device: Any) -> None:
        """Refuse any device but the CPU."""
        # the device attribute reports the CPU, but torch's own code sees the meta device
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            self.refuse(f"it places tensors on {device}")
