"""Tracks after which draw each random generator is, while no numbers are really drawn."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_SEED_BYTES = 24  # a CPU generator's state begins with seed and counters; words of 8 bytes (4 used) follow


class GeneratorTracker:
    """Gives generators a distinct state after every draw, so that seeding, saving and restoring can be detected.

    No hook exists for ``torch.manual_seed`` or for setting a saved state. But a state that represents "after draw 7" is
    recognized wherever it recurs, and any other state was set from outside.
    """

    def __init__(self) -> None:
        self._before: dict[torch.Generator, Tensor] = {}
        self._names: dict[bytes, int] = {}
        self.watch(torch.default_generator)

    def watch(self, generator: torch.Generator) -> None:
        """Save the state in which the generator is first seen."""
        self._before.setdefault(generator, generator.get_state())

    def current(self, generator: torch.Generator) -> Tensor | int:
        """The generator's position: the number of the draw that its state represents, else the state."""
        state = generator.get_state()
        return self._names.get(_digest(state), state)

    def draw(self, generator: torch.Generator, number: int) -> Tensor | int:
        """Move the generator to the state that represents "after draw `number`".

        Returns:
            The generator's former position, as in `current`.

        Raises:
            RuntimeError: the generator does not accept the state that represents the draw.
        """
        self.watch(generator)
        before = self.current(generator)
        marked = generator.get_state()
        words = marked[_SEED_BYTES:].view(torch.int64)  # (624 or more,)
        words[1], words[2] = number & 0xFFFFFFFF, ~number & 0xFFFFFFFF
        generator.set_state(marked)
        if not torch.equal(generator.get_state(), marked):
            raise RuntimeError("the generator's state has a layout that is not known here")
        self._names[_digest(marked)] = number
        return before

    def close(self) -> dict[torch.Generator, Tensor | int]:
        """Restore every generator that was seen; returns their final positions, as in `current`."""
        ends = {generator: self.current(generator) for generator in self._before}
        for generator, state in self._before.items():
            generator.set_state(state)
        return ends


def _digest(state: Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
