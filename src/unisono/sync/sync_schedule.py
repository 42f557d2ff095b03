"""The schedule of a periodic synchronizer: functions of the number of steps taken.

    start      every            every            start: synchronous steps
────┬──────────┬───────────────┬───────────────  every: steps from one exchange of a fragment to its next
  ══╪══════════╪══▲────┬──●════╪══▲────┬──●      ▲: fragment 0 is sent; ●: received, `delay` steps later
    │          │       ▲────┬──●      ▲────┬──●  fragment 1, half a period later
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from unisono.errors import InvalidInput
from unisono.sync.outer_optimizer import Average, Outer


@dataclass(frozen=True)
class SyncSchedule:
    """The parameters in which the forms of the periodic algorithm differ.

    Args:
        every: steps between two exchanges of the same fragment, from 1.
        start: the number of synchronous steps at the beginning.
        fragments: into how many parts the parameters are divided, each synchronized every `every` steps; at most
            `every`.
        delay: steps between sending a local update and applying the mean update, below `every`.
        mix: the fraction of a replica's weights that stays when the anchor is mixed in, from 0 to below 1.
        outer: how the mean update changes the anchor.

    Raises:
        ValueError: a number is out of its bounds.
    """

    every: int
    start: int = 0
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    outer: Outer = Average()

    def __post_init__(self) -> None:
        bounds = {"every": (1, None), "start": (0, None), "fragments": (1, self.every), "delay": (0, self.every - 1)}
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} is not a whole number from {least}")
            if most is not None and value > most:
                raise ValueError(f"{name}={value!r} is more than {most} with every={self.every}")
        if not isinstance(self.mix, int | float) or isinstance(self.mix, bool) or not 0 <= self.mix < 1:
            raise ValueError(f"mix={self.mix!r} is not a number from 0 to below 1")

    @property
    def whole(self) -> bool:
        """Whether an exchange makes all replicas equal."""
        return self.fragments == 1 and not self.delay and not self.mix

    def is_synchronous(self, taken: int) -> bool:
        """Whether the step that follows `taken` steps is synchronous."""
        return taken < self.start

    def due(self, taken: int) -> int | None:
        """The fragment, if any, that is sent after step number `taken` (from 1).

        The last fragment is sent at the end of each period, the others at even distances before it.
        """
        local = taken - self.start
        offsets = [(f + 1) * self.every // self.fragments % self.every for f in range(self.fragments)]
        return offsets.index(local % self.every) if local > 0 and local % self.every in offsets else None


P = TypeVar("P", bound=nn.Parameter)


def divide(parameters: Mapping[str, P], fragments: int) -> list[dict[str, P]]:
    """Assign each parameter, in the model's order, to the fragment with the fewest bytes so far.

    So equal layers are strided over the fragments (Douillard et al. 2025, "strided pattern"), and the sizes of two
    fragments differ by at most the largest tensor.

    Raises:
        InvalidInput: there are more fragments than parameters.
    """
    if fragments > len(parameters):
        raise InvalidInput(
            "fragments",
            fragments,
            f"the model has only {len(parameters)} trainable tensors",
            f"use at most {len(parameters)}",
        )
    divided: list[dict[str, P]] = [{} for _ in range(fragments)]
    sizes = [(0, 0)] * fragments  # bytes, then tensors, so that no fragment stays empty
    for name, parameter in parameters.items():
        lightest = sizes.index(min(sizes))
        divided[lightest][name] = parameter
        size, count = sizes[lightest]
        sizes[lightest] = size + parameter.numel() * parameter.element_size(), count + 1
    return divided
