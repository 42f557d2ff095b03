"""Compute times of workers: distributions as values, and samples of them.

A *share* is the part of a step that one worker computes if all compute equally: forward and backward of ``global_batch
/ workers`` samples. A worker that computes more takes proportionally longer.
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
    """A random time."""

    def draw(self, random: random.Random) -> float:
        """Seconds, 0 or more."""


@dataclass(frozen=True)
class Fixed:
    """A time that is always `seconds`."""

    seconds: float

    def draw(self, random: random.Random) -> float:
        return self.seconds


@dataclass(frozen=True)
class Normal:
    """A time that is normally distributed, with mean `seconds` and standard deviation ``deviation * seconds``. It is
    truncated at three standard deviations and at 0."""

    seconds: float
    deviation: float

    def draw(self, random: random.Random) -> float:
        deviations = random.gauss(0.0, 1.0)
        while abs(deviations) > 3:
            deviations = random.gauss(0.0, 1.0)
        return max(0.0, self.seconds * (1 + self.deviation * deviations))


@dataclass(frozen=True)
class Uniform:
    """A time that is uniformly distributed between `least` and `most` seconds."""

    least: float
    most: float

    def draw(self, random: random.Random) -> float:
        return random.uniform(self.least, self.most)


@dataclass(frozen=True)
class Compute:
    """The compute time of a share of a step: one duration for all workers, or one for each worker."""

    durations: tuple[Duration, ...]

    @staticmethod
    def of(field: str, text: str) -> Compute:
        """Parse ``50ms``, ``50ms±10%``, ``40ms..80ms`` or a comma-separated list of these.

        Raises:
            InvalidInput: the text is none of these.
        """
        return Compute(tuple(_duration(field, text, part.strip()) for part in text.split(",")))

    def check(self, field: str, text: str, workers: int) -> None:
        """Raise `InvalidInput` unless there is a duration for each of `workers`."""
        if len(self.durations) not in (1, workers):
            problem = f"{len(self.durations)} times for {workers} worker{'s' * (workers != 1)}"
            raise InvalidInput(field, text, problem, "pass one for all, or one for each")

    def seconds(self, seed: int, worker: int, step: int) -> float:
        """The time of a share of `step` on `worker`: a function of these numbers alone."""
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
        raise InvalidInput(field, text, "the range begins above its end", _CURE)
    return made


def _share(field: str, text: str) -> float:
    found = re.fullmatch(r"([0-9]+\.?[0-9]*)\s*%", text)
    if not found or not float(found[1]) <= 100:
        raise InvalidInput(field, text, f"{text or 'nothing'} after ± is not a share from 0% to 100%", _CURE)
    return float(found[1]) / 100


def quantiles(values: Sequence[float], *shares: float) -> list[float]:
    """For each of `shares`, the smallest of `values` that at least this share of them does not exceed.

    The results are nan if there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        return [math.nan] * len(shares)
    return [ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in shares]
