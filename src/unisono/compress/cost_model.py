"""Forecasts the time of a step with each of several compressors, by arithmetic on measurements, without I/O.

The exchange of a bucket takes several messages. A message of `b` bytes takes ``latency + b / rate`` seconds; latency
and rate depend on its collective operation. The link carries one bucket after the other, and part of each exchange
overlaps with computing::

    step = computing + (arithmetic + max(0, exchange - hidden)) / share

A bucket has measurements only of itself. It extrapolates to all buckets by its `share` of all bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HIDDEN_FRACTION = 0.5
"""The part of a step's computing that is assumed to overlap with exchanges if no wait was measured.

Backward takes two thirds of the computing, and the last bucket fills at its end.
"""

WORTH_TRYING = 1.5
"""A candidate is tried only if its forecast is at most this multiple of the best forecast.

Forecasts err by a third where workers share a processor.
"""

_NEGLIGIBLE = 0.1  # part of an exchange; shorter waits come from the clock's resolution and from unequal workers


@dataclass(frozen=True)
class LinkCost:
    """The cost of messages of one collective operation: latency, and seconds per byte of a worker's input."""

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, size_bytes: float) -> float:
        """The time of one message."""
        return self.latency_seconds + self.seconds_per_byte * size_bytes


@dataclass(frozen=True)
class Candidate:
    """The cost of one bucket with one compressor.

    Args:
        name: the compressor as the user wrote it.
        arithmetic_seconds: the time for encoding and decoding, on the slowest worker.
        messages: the collective operations of one mean, each with the size in bytes of a worker's input.
    """

    name: str
    arithmetic_seconds: float
    messages: tuple[tuple[str, int], ...]

    def exchange_seconds(self, links: Mapping[str, LinkCost]) -> float:
        """The time of all messages on `links`."""
        return sum(links[verb].seconds(size) for verb, size in self.messages)

    @property
    def sent_bytes(self) -> int:
        """The size in bytes of a worker's inputs to all messages."""
        return sum(size for _, size in self.messages)


@dataclass(frozen=True)
class CandidateCost:
    """The forecast for one candidate: its cost in this bucket, and the time of a step in which all buckets use it."""

    arithmetic_seconds: float
    exchange_seconds: float
    step_seconds: float


def fit(points: Sequence[tuple[int, float]]) -> LinkCost:
    """The latency and the rate by the line through the smallest and the largest of the points ``(bytes, seconds)``.

    Both are at least 0.
    """
    (small, least), (large, most) = min(points), max(points)
    rate = max(0.0, most - least) / (large - small) if large > small else 0.0
    return LinkCost(max(0.0, least - rate * small), rate)


@dataclass(frozen=True)
class OverlapModel:
    """How much of a bucket's exchange overlaps with computing.

    Args:
        computing_seconds: the time of a step without compression and exchange.
        hidden_seconds: the part of this bucket's exchange that overlaps with computing.
        share: this bucket's part of the bytes of all buckets, above 0 and at most 1.
    """

    computing_seconds: float
    hidden_seconds: float
    share: float = 1.0


def measured_overlap(
    measured: Candidate, links: Mapping[str, LinkCost], step_seconds: float, blocked_seconds: float, share: float
) -> OverlapModel:
    """The overlap in steps that took `step_seconds` with `measured`, and waited `blocked_seconds` for this bucket."""
    computing = max(0.0, step_seconds - (measured.arithmetic_seconds + blocked_seconds) / share)
    exchange = measured.exchange_seconds(links)
    if blocked_seconds > _NEGLIGIBLE * exchange:
        return OverlapModel(computing, max(0.0, exchange - blocked_seconds), share)
    return OverlapModel(computing, max(exchange, HIDDEN_FRACTION * computing * share), share)


def forecast(candidate: Candidate, links: Mapping[str, LinkCost], overlap: OverlapModel) -> CandidateCost:
    """The forecast of a step with `candidate` in all buckets."""
    exchange = candidate.exchange_seconds(links)
    exposed = candidate.arithmetic_seconds + max(0.0, exchange - overlap.hidden_seconds)
    return CandidateCost(candidate.arithmetic_seconds, exchange, overlap.computing_seconds + exposed / overlap.share)


def pick(step_seconds: Sequence[float], gain: float) -> int:
    """The index of the best of `step_seconds`, which begin with the most accurate candidate.

    A later candidate is picked only if its step is shorter than the best one before it by the fraction `gain`.
    """
    best = 0
    for i, seconds in enumerate(step_seconds):
        if seconds < (1 - gain) * step_seconds[best]:
            best = i
    return best


def trial_order(forecasts: Sequence[CandidateCost], gain: float) -> tuple[int, ...]:
    """The candidate of each trial round of a bucket: every candidate once, then the candidate with the best forecast.

    The latter also takes the place of candidates that are not `WORTH_TRYING`. So all buckets have equally many rounds,
    and are always in the same round.
    """
    steps = [each.step_seconds for each in forecasts]
    best = pick(steps, gain)
    return (*(i if seconds <= WORTH_TRYING * steps[best] else best for i, seconds in enumerate(steps)), best)
