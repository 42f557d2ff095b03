"""How long a worker computes: distributions as values, and what one share of one step takes.

A *share* is what one worker computes of a step when all compute alike: forward and backward of
``global_batch / workers`` samples. Who computes more of a step takes longer in proportion.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from unisono.errors import InvalidInput
from unisono.plan import units

_CURE = "write for instance 50ms, 50ms±10%, 40ms..80ms, one of them per worker (50ms,170ms), or auto"


class Duration(Protocol):
    """A time that varies."""

    def draw(self, random: random.Random) -> float:
        """Seconds, 0 or more."""


@dataclass(frozen=True)
class Fixed:
    """The same `seconds` every time."""

    seconds: float

    def draw(self, random: random.Random) -> float:
        return self.seconds


@dataclass(frozen=True)
class Normal:
    """Normal, with the standard deviation `deviation` as a share of the mean `seconds`; cut off at three of them, and
    at 0."""

    seconds: float
    deviation: float

    def draw(self, random: random.Random) -> float:
        away = random.gauss(0.0, 1.0)
        while abs(away) > 3:
            away = random.gauss(0.0, 1.0)
        return max(0.0, self.seconds * (1 + self.deviation * away))


@dataclass(frozen=True)
class Uniform:
    """Anything from `least` to `most` seconds, equally likely."""

    least: float
    most: float

    def draw(self, random: random.Random) -> float:
        return random.uniform(self.least, self.most)


@dataclass(frozen=True)
class Compute:
    """What a share of a step takes, by worker: one duration for all of them, or one each."""

    durations: tuple[Duration, ...]

    @staticmethod
    def of(field: str, text: str) -> Compute:
        """From ``50ms``, ``50ms±10%``, ``40ms..80ms`` or a list of these with commas between.

        Raises:
            InvalidInput: it is written otherwise.
        """
        return Compute(tuple(_duration(field, text, part.strip()) for part in text.split(",")))

    def check(self, field: str, text: str, workers: int) -> None:
        """Raise `InvalidInput` unless there is a duration for each of `workers`."""
        if len(self.durations) not in (1, workers):
            problem = f"{len(self.durations)} times for {workers} worker{'s' * (workers != 1)}"
            raise InvalidInput(field, text, problem, "give one for all, or one for each")

    def seconds(self, seed: int, worker: int, step: int) -> float:
        """What a share of `step` takes `worker`: a function of these numbers alone."""
        duration = self.durations[worker if len(self.durations) > 1 else 0]
        return duration.draw(random.Random(f"compute {seed} {worker} {step}"))


def _duration(field: str, whole: str, text: str) -> Duration:
    try:
        return _read(field, text)
    except InvalidInput as error:
        raise InvalidInput(field, whole or "(nothing)", f"{text or 'nothing'}: {error.problem}", _CURE) from None


def _read(field: str, text: str) -> Duration:
    middle, sign, share = (part.strip() for part in re.sub(r"\+-|\+/-", "±", text).partition("±"))
    if sign:
        return Normal(units.seconds(field, middle), _share(field, share))
    least, dots, most = (part.strip() for part in text.partition(".."))
    if not dots:
        return Fixed(units.seconds(field, text))
    made = Uniform(units.seconds(field, least), units.seconds(field, most))
    if made.least > made.most:
        raise InvalidInput(field, text, "begins above its end", _CURE)
    return made


def _share(field: str, text: str) -> float:
    found = re.fullmatch(r"([0-9]+\.?[0-9]*)\s*%", text)
    if not found or not float(found[1]) <= 100:
        raise InvalidInput(field, text, f"{text or 'nothing'} after ± is not a share from 0% to 100%", _CURE)
    return float(found[1]) / 100


def quantiles(values: Sequence[float], *shares: float) -> list[float]:
    """The least values such that at least each of `shares` of `values` are not above; nan of nothing."""
    ordered = sorted(values)
    if not ordered:
        return [math.nan] * len(shares)
    return [ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in shares]
