"""Where generators stand while nothing is drawn from them in earnest."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_SEED_BYTES = 24  # a CPU generator's state begins with its seed and counters; words of 8 bytes (4 used) follow


class GeneratorTracker:
    """Gives generators a state of its own after every draw, so that seeding, saving and restoring are seen.

    Nothing tells when the user's code calls ``torch.manual_seed`` or puts a saved state back. But a state that
    stands for "after draw 7" is found again wherever it comes back, and any other state was set from outside.
    """

    def __init__(self) -> None:
        self._before: dict[torch.Generator, Tensor] = {}
        self._names: dict[bytes, int] = {}
        self.watch(torch.default_generator)

    def watch(self, generator: torch.Generator) -> None:
        """Keep the state in which the generator is found first."""
        self._before.setdefault(generator, generator.get_state())

    def current(self, generator: torch.Generator) -> Tensor | int:
        """The generator's state, or the draw after which it is."""
        state = generator.get_state()
        return self._names.get(_digest(state), state)

    def draw(self, generator: torch.Generator, number: int) -> Tensor | int:
        """Where the generator is before draw `number`; from here on it is after that.

        Raises:
            RuntimeError: the generator does not take the state that stands for the draw.
        """
        self.watch(generator)
        here = self.current(generator)
        stand_in = generator.get_state()
        words = stand_in[_SEED_BYTES:].view(torch.int64)  # (624 or more,)
        words[1], words[2] = number & 0xFFFFFFFF, ~number & 0xFFFFFFFF
        generator.set_state(stand_in)
        if not torch.equal(generator.get_state(), stand_in):
            raise RuntimeError("the generator's state has a layout that is not known here")
        self._names[_digest(stand_in)] = number
        return here

    def close(self) -> dict[torch.Generator, Tensor | int]:
        """Put every generator that was seen back to where it was found; returns where they were now."""
        ends = {generator: self.current(generator) for generator in self._before}
        for generator, state in self._before.items():
            generator.set_state(state)
        return ends


def _digest(state: Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
