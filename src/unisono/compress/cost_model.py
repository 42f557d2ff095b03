"""How long a step takes with each of several compressors: arithmetic on measured figures, without I/O.

A bucket's exchange takes some messages; a message of `b` bytes takes ``latency + b / rate``, by the kind of its verb.
The link carries one bucket after the other, and of each some seconds are hidden behind computing::

    step = computing + (arithmetic + max(0, exchange - hidden)) / share

One bucket knows its own figures; that it is `share` of all bytes stands for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HIDES = 0.5
"""Part of a step's computing behind which buckets can travel, where that much has not been tried: backward is two
thirds of it, and the last bucket fills at its end."""

WORTH_TRYING = 1.5
"""A candidate with a longer forecast than so many times the best one's is not tried: forecasts err by a third where
workers share a processor."""

_NOTHING = 0.1  # of an exchange; shorter waits are those of a clock and of unequal workers


@dataclass(frozen=True)
class LinkCost:
    """What messages of one verb cost: seconds of the shortest, and seconds per byte that a worker hands in."""

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, size_bytes: float) -> float:
        """One message."""
        return self.latency_seconds + self.seconds_per_byte * size_bytes


@dataclass(frozen=True)
class Candidate:
    """What one bucket costs with one compressor.

    Args:
        name: as the user wrote it.
        arithmetic_seconds: encoding and decoding, on the slowest worker.
        messages: the verbs of one mean, each with the bytes that a worker hands in.
    """

    name: str
    arithmetic_seconds: float
    messages: tuple[tuple[str, int], ...]

    def exchange_seconds(self, links: Mapping[str, LinkCost]) -> float:
        """Time on the wire."""
        return sum(links[verb].seconds(size) for verb, size in self.messages)

    @property
    def sent_bytes(self) -> int:
        """All that a worker hands in."""
        return sum(size for _, size in self.messages)


@dataclass(frozen=True)
class CandidateCost:
    """One candidate: what this bucket costs, and how long a step takes with it in all buckets."""

    arithmetic_seconds: float
    exchange_seconds: float
    step_seconds: float


def fit(points: Sequence[tuple[int, float]]) -> LinkCost:
    """The link through the smallest and the largest of ``(bytes, seconds)``; neither figure is below zero."""
    (small, least), (large, most) = min(points), max(points)
    rate = max(0.0, most - least) / (large - small) if large > small else 0.0
    return LinkCost(max(0.0, least - rate * small), rate)


@dataclass(frozen=True)
class OverlapModel:
    """What hides a bucket's exchange.

    Args:
        computing_seconds: of a step, all but what compression and exchange add to it.
        hidden_seconds: of this bucket's exchange.
        share: this bucket's part of all bytes, above 0 and at most 1.
    """

    computing_seconds: float
    hidden_seconds: float
    share: float = 1.0


def pace(
    begun: Candidate, links: Mapping[str, LinkCost], step_seconds: float, blocked_seconds: float, share: float
) -> OverlapModel:
    """From steps that took `step_seconds` with `begun`, in which this bucket was waited for `blocked_seconds`."""
    computing = max(0.0, step_seconds - (begun.arithmetic_seconds + blocked_seconds) / share)
    exchange = begun.exchange_seconds(links)
    if blocked_seconds > _NOTHING * exchange:
        return OverlapModel(computing, max(0.0, exchange - blocked_seconds), share)
    return OverlapModel(computing, max(exchange, HIDES * computing * share), share)


def forecast(candidate: Candidate, links: Mapping[str, LinkCost], pace: OverlapModel) -> CandidateCost:
    """A step with `candidate` in all buckets."""
    exchange = candidate.exchange_seconds(links)
    shown = candidate.arithmetic_seconds + max(0.0, exchange - pace.hidden_seconds)
    return CandidateCost(candidate.arithmetic_seconds, exchange, pace.computing_seconds + shown / pace.share)


def pick(step_seconds: Sequence[float], gain: float) -> int:
    """Which of some steps, that of the most faithful candidate first: a later one only where it is shorter by `gain`
    (0.1 is ten percent) than the best before it."""
    best = 0
    for i, seconds in enumerate(step_seconds):
        if seconds < (1 - gain) * step_seconds[best]:
            best = i
    return best


def heats(forecasts: Sequence[CandidateCost], gain: float) -> tuple[int, ...]:
    """Which candidate a bucket goes by in each heat: every candidate in its turn, the favourite in place of those
    that are out of the question, and the favourite at the end. So that all buckets are in the same heat, there are as
    many for each of them."""
    steps = [each.step_seconds for each in forecasts]
    favourite = pick(steps, gain)
    return (
        *(i if seconds <= WORTH_TRYING * steps[favourite] else favourite for i, seconds in enumerate(steps)),
        favourite,
    )
