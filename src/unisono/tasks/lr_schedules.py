"""Learning-rate schedules: pure functions of the step, without state.

A schedule is called as ``schedule(step, steps)`` and returns the factor on the learning rate of every parameter group
for step `step` (from 0) of `steps`. Any function of that form is a schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from unisono.errors import InvalidInput


class Schedule(Protocol):
    """A learning-rate schedule: ``schedule(step, steps)`` returns the factor on the learning rates."""

    def __call__(self, step: int, steps: int, /) -> float: ...


@dataclass(frozen=True)
class Constant:
    """Factor 1 after a linear warm-up of `warmup` steps."""

    warmup: int = 0

    def __post_init__(self) -> None:
        _check(self.warmup)

    def __call__(self, step: int, steps: int) -> float:
        return _warm(step, self.warmup)


@dataclass(frozen=True)
class Linear:
    """Linear warm-up, then linear decay to `floor` at the last step."""

    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check(self.warmup, self.floor)

    def __call__(self, step: int, steps: int) -> float:
        return _warm(step, self.warmup) * (1 - (1 - self.floor) * _progress(step, steps, self.warmup))


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up, then cosine decay to `floor` at the last step (Loshchilov & Hutter 2017, eq. 5)."""

    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check(self.warmup, self.floor)

    def __call__(self, step: int, steps: int) -> float:
        wave = (1 + math.cos(math.pi * _progress(step, steps, self.warmup))) / 2
        return _warm(step, self.warmup) * (self.floor + (1 - self.floor) * wave)


SCHEDULES: dict[str, type] = {cls.__name__: cls for cls in (Constant, Linear, Cosine)}


def factor_of(schedule: Schedule, step: int, steps: int) -> float:
    """The factor of `schedule` for `step` of `steps`.

    Raises:
        InvalidInput: the factor is not a finite number from 0.
    """
    returned: Any = schedule(step, steps)
    try:
        factor = float(returned)
    except (TypeError, ValueError):
        factor = math.nan
    if not 0 <= factor < math.inf:
        raise InvalidInput(f"schedule({step}, {steps})", returned, "not a factor on the learning rate",
                           "return a finite number from 0")  # fmt: skip
    return factor


def _check(warmup: int, floor: float = 0.0) -> None:
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
        raise ValueError(f"warmup={warmup!r} is not a whole number of steps from 0")
    if not isinstance(floor, int | float) or not 0 <= floor <= 1:
        raise ValueError(f"floor={floor!r} is not a factor from 0 to 1")


def _warm(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def _progress(step: int, steps: int, warmup: int) -> float:
    return min(1.0, max(0.0, (step - warmup) / max(1, steps - 1 - warmup)))
