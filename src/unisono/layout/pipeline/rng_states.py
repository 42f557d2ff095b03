"""The random generators that a forward pass draws from, whose states go with a micro-batch from stage to stage."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Generators:
    """torch's on the CPU, that of `device` where it is another, and Python's; by their index."""

    device: torch.device

    @property
    def count(self) -> int:
        """How many there are."""
        return 2 if self.device.type == "cpu" else 3

    def states(self) -> list[Tensor]:
        """What each would go on from, as bytes on the CPU."""
        found = [_python_state(), torch.get_rng_state()]
        if self.device.type != "cpu":
            found.append(torch.get_device_module(self.device).get_rng_state(self.device))
        return found

    def pack(self, which: Collection[int]) -> Tensor:
        """The states of some of them, one after the other, on the device."""
        states = self.states()
        return torch.cat([states[i] for i in sorted(which)]).to(self.device)

    def unpack(self, message: Tensor, which: Collection[int]) -> None:
        """Go on from what `packed` gave, here or elsewhere."""
        sizes = [state.numel() for i, state in enumerate(self.states()) if i in which]
        for i, state in zip(sorted(which), message.cpu().split(sizes), strict=True):
            self._set(i, state.clone())

    def restore(self, states: Sequence[Tensor]) -> None:
        """Go on from `states`."""
        for i, state in enumerate(states):
            self._set(i, state)

    def drawn_since(self, before: Sequence[Tensor]) -> list[bool]:
        """Which of them have drawn since `before` was their `states`."""
        return [not torch.equal(then, now) for then, now in zip(before, self.states(), strict=True)]

    def _set(self, which: int, state: Tensor) -> None:
        if which == 0:
            _set_python(state)
        elif which == 1:
            torch.set_rng_state(state)
        else:
            torch.get_device_module(self.device).set_rng_state(state, self.device)


def _python_state() -> Tensor:
    """Mersenne twister's words, and the half of a pair of normal numbers that may wait."""
    _, words, waiting = random.getstate()
    numbers = torch.tensor([*words, int(waiting is not None)], dtype=torch.int64, device="cpu")
    half = torch.tensor([waiting or 0.0], dtype=torch.float64, device="cpu")
    return torch.cat([numbers.view(torch.uint8), half.view(torch.uint8)])


def _set_python(state: Tensor) -> None:
    *words, waits = state[:-8].view(torch.int64).tolist()
    random.setstate((3, tuple(words), float(state[-8:].clone().view(torch.float64)) if waits else None))
