"""Replays a tape on real memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from unisono.layout.deferred.replay_order import needed, schedule
from unisono.layout.deferred.tape import Draw, GeometryOnly, Tape, TapeOperation, TensorView, leaves, map_leaves

Ends = Mapping[torch.Generator, Tensor | int]


def replay(tape: Tape, wanted: Iterable[int], ends: Ends, release: Callable[[int, UntypedStorage], None]) -> None:
    """Replay the operations that the final content of `wanted` needs. A storage is in memory only from its first to its
    last use.

    Args:
        tape: the recorded operations.
        wanted: numbers of storages.
        ends: for each generator its final state, or the number of the draw after which it is left.
        release: called once with each wanted storage and its final content, just before it is freed.
    """
    wanted = frozenset(wanted)
    work = needed(tape, wanted, (end for end in ends.values() if isinstance(end, int)))
    player = _Replayer(tape, _states_to_keep(tape, work.drawn, ends))
    uses = Counter(storage for number in work.live for storage in _touched(tape.operations[number]))
    with torch.no_grad():
        for number in schedule(tape, work, wanted):
            player.run(number, live=number in work.live)
            for storage in _touched(tape.operations[number]) if number in work.live else ():
                uses[storage] -= 1
                if not uses[storage]:
                    content = player.storages.pop(storage)
                    if storage in wanted:
                        release(storage, content)
                    del content
    for generator, end in ends.items():
        player.set_generator(generator, end)


def last_draws(tape: Tape, wanted: Iterable[int]) -> dict[torch.Generator, Tensor | int]:
    """The last draw from each generator that the content of `wanted` needs."""
    draws = ((number, tape.operations[number].draw) for number in sorted(needed(tape, wanted, ()).drawn))
    return {draw.generator: number for number, draw in draws if draw is not None}


class _Replayer:
    """The storages and generator states during a replay."""

    def __init__(self, tape: Tape, remembered: set[int]) -> None:
        self.storages: dict[int, UntypedStorage] = {}
        self._tape = tape
        self._keep_states = remembered
        self._states = dict(tape.states)
        self._at: dict[torch.Generator, int] = {}

    def run(self, number: int, live: bool) -> None:
        """Run one operation; if it is not `live`, only for its effect on the generator."""
        operation = self._tape.operations[number]
        if operation.draw is not None:
            self.set_generator(operation.draw.generator, operation.draw.start)
        with _default_dtype(operation.default_dtype):
            leaf = self._real if live else _blank
            args, kwargs = map_leaves(operation.args, leaf), map_leaves(operation.kwargs, leaf)
            result = operation.call(*args, **kwargs)
        if operation.draw is not None:
            self._at[operation.draw.generator] = number
            if number in self._keep_states:
                self._states[number] = operation.draw.generator.get_state()
        if live:
            inputs = {tensor.untyped_storage()._cdata for tensor in leaves((args, kwargs), Tensor)}
            for place, tensor in zip(operation.fresh, leaves(result, Tensor), strict=True):
                if place is not None:
                    self._store(place, tensor, inputs)

    def set_generator(self, generator: torch.Generator, state: Tensor | int) -> None:
        """Set the generator to a state, or to the state after a draw."""
        if isinstance(state, Tensor):
            generator.set_state(state)
        elif self._at.get(generator) != state:
            generator.set_state(self._states[state])

    def _real(self, value: Any) -> Any:
        if isinstance(value, TensorView):
            return value.on(self._storage(value.storage))
        return _blank(value)

    def _storage(self, number: int) -> UntypedStorage:
        if number not in self.storages:
            self.storages[number] = UntypedStorage(self._tape.storages[number].nbytes())
        return self.storages[number]

    def _store(self, place: TensorView, tensor: Tensor, inputs: set[int]) -> None:
        """Adopt the memory of a returned tensor if its view is as inferred on the meta device; else copy the tensor."""
        storage = tensor.untyped_storage()
        assert (tensor.device.type, tensor.dtype, tensor.size()) == ("cpu", place.dtype, place.size)
        as_inferred = (tensor.stride(), tensor.storage_offset()) == (place.stride, place.offset)
        if as_inferred and place.storage not in self.storages and storage._cdata not in inputs:
            if storage.nbytes() < (nbytes := self._tape.storages[place.storage].nbytes()):
                storage.resize_(nbytes)
            self.storages[place.storage] = storage
        else:
            place.on(self._storage(place.storage)).copy_(tensor)


def _blank(value: Any) -> Any:
    if isinstance(value, GeometryOnly):
        return value.view.blank("meta")
    return value.blank("cpu") if isinstance(value, TensorView) else value


def _touched(operation: TapeOperation) -> frozenset[int]:
    return operation.reads | operation.writes


def _states_to_keep(tape: Tape, drawn: set[int], ends: Ends) -> set[int]:
    """The draws after which the generator's state is kept, as it is needed again after other draws."""
    remembered: set[int] = set()
    at: dict[torch.Generator, int] = {}
    for number, draw in (
        *_draws(tape, drawn),
        *((-1, Draw(generator, end)) for generator, end in ends.items()),
    ):
        if isinstance(draw.start, int) and at.get(draw.generator) != draw.start:
            remembered.add(draw.start)
        at[draw.generator] = number
    return remembered


def _draws(tape: Tape, drawn: set[int]) -> Iterator[tuple[int, Draw]]:
    for number in sorted(drawn):
        draw = tape.operations[number].draw
        if draw is not None:
            yield number, draw


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype == before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
