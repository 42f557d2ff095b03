"""The random generators of a forward pass, whose states travel with a micro-batch from stage to stage."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Generators:
    """The generators of a forward pass, by index: Python's, torch's on the CPU, and that of `device` if not the CPU."""

    device: torch.device

    @property
    def count(self) -> int:
        """The number of generators."""
        return 2 if self.device.type == "cpu" else 3

    def states(self) -> list[Tensor]:
        """The state of each generator, as bytes on the CPU."""
        found = [_python_state(), torch.get_rng_state()]
        if self.device.type != "cpu":
            found.append(torch.get_device_module(self.device).get_rng_state(self.device))
        return found

    def pack(self, which: Collection[int]) -> Tensor:
        """The states of the generators `which`, concatenated, on the device."""
        states = self.states()
        return torch.cat([states[i] for i in sorted(which)]).to(self.device)

    def unpack(self, message: Tensor, which: Collection[int]) -> None:
        """Set the generators `which` to the states that `pack` put into `message`, on this or another worker."""
        sizes = [state.numel() for i, state in enumerate(self.states()) if i in which]
        for i, state in zip(sorted(which), message.cpu().split(sizes), strict=True):
            self._set(i, state.clone())

    def restore(self, states: Sequence[Tensor]) -> None:
        """Set all states."""
        for i, state in enumerate(states):
            self._set(i, state)

    def drawn_since(self, before: Sequence[Tensor]) -> list[bool]:
        """For each generator, whether it has drawn since it had its state in `before`."""
        return [not torch.equal(then, now) for then, now in zip(before, self.states(), strict=True)]

    def _set(self, which: int, state: Tensor) -> None:
        if which == 0:
            _set_python(state)
        elif which == 1:
            torch.set_rng_state(state)
        else:
            torch.get_device_module(self.device).set_rng_state(state, self.device)


def _python_state() -> Tensor:
    """The words of the Mersenne twister, and the second of a pair of normal random numbers, if it is still unused."""
    _, words, waiting = random.getstate()
    numbers = torch.tensor([*words, int(waiting is not None)], dtype=torch.int64, device="cpu")
    half = torch.tensor([waiting or 0.0], dtype=torch.float64, device="cpu")
    return torch.cat([numbers.view(torch.uint8), half.view(torch.uint8)])


def _set_python(state: Tensor) -> None:
    *words, waits = state[:-8].view(torch.int64).tolist()
    random.setstate((3, tuple(words), float(state[-8:].clone().view(torch.float64)) if waits else None))
