"""Measure the link and the arithmetic, and pick what makes a step shortest; often that is not to compress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from unisono.compress.cast import Cast
from unisono.compress.compressor import Codec, Compressor, Mean, Wire
from unisono.compress.delegate import Delegate, check_compressor
from unisono.compress.forecast import Candidate, Forecast, Link, Pace, fit, forecast, pace, pick, reason
from unisono.compress.memory import Memory
from unisono.compress.power_sgd import PowerSGD
from unisono.compress.probe import probe, slowest
from unisono.compress.quantize import Quantize
from unisono.compress.rehearsal import rehearse
from unisono.compress.span import Span

LOG = logging.getLogger("unisono")

_CARRIES: dict[str, Callable[[int], float]] = {  # what a worker's link carries, per byte handed in, of n workers
    "sum": lambda n: 2 * (n - 1) / n,
    "gather": lambda n: n - 1,
    "exchange": lambda n: (n - 1) / n,
}


@dataclass(frozen=True)
class Auto(Delegate):
    """Each bucket's `mean` is taken by that one of `candidates` with which a step is predicted to be shortest.

    On the first step a bucket rehearses every candidate without peers, on its own numbers, which gives the seconds
    of arithmetic and the messages; and sends messages of growing size, which gives latency and rate of each verb. For
    `steps` steps it then goes by the candidate that is fastest where nothing is hidden behind computing, and measures
    whole steps and how long it waits. From these figures, each of the slowest worker, `forecast` says how long a step
    takes with each candidate; all workers know the same figures, and so decide alike. A candidate is taken only where
    the step is shorter by `gain` than with the ones before it: list the most faithful first. After `again` steps all
    is measured again. Every decision is one sentence in the log, by worker 0.

    What has no `mean` (servers, gossip) needs messages of one length that is known beforehand: there, this is `fixed`.

    Args:
        candidates: compressors to choose from, the most faithful first. By default those that lose next to nothing of
            what is learned; `OneBit` and `TopK` send less, and may need more steps than they save.
        fixed: what it is where there is no `mean`.
        gain: least part of a step that a less faithful candidate has to save.
        steps: steps whose duration is measured, at least 3.
        again: steps from one measurement to the next; 0 measures once.

    Raises:
        ValueError: no candidates; one that is no compressor, or that sums in another type than the others (`Exact`);
            `gain` outside 0..1; `steps` below 3; `again` neither 0 nor above `steps`.
    """

    candidates: tuple[Compressor, ...] = (Cast(), Cast("bf16"), Quantize(8), Quantize(4), PowerSGD(4))
    fixed: Compressor = Quantize(8)
    gain: float = 0.05
    steps: int = 6
    again: int = 1000

    def __post_init__(self) -> None:
        if not isinstance(self.candidates, tuple) or not self.candidates:
            raise ValueError(f"candidates={self.candidates!r} is no tuple of compressors")
        for candidate in (*self.candidates, self.fixed):
            check_compressor("candidates", candidate)
            if candidate.total_dtype(torch.float32) != torch.float32:
                raise ValueError(f"candidates: {candidate!r} sums in another type than the others")
        if not 0 <= self.gain < 1:
            raise ValueError(f"gain={self.gain!r} is not from 0 to below 1")
        if not isinstance(self.steps, int) or self.steps < 3:
            raise ValueError(f"steps={self.steps!r} is not a whole number from 3")
        if not isinstance(self.again, int) or (self.again != 0 and self.again <= self.steps):
            raise ValueError(f"again={self.again!r} is neither 0 nor above steps={self.steps}")

    @property
    def stands_for(self) -> Compressor:
        return self.fixed

    @property
    def adds_up(self) -> bool:
        return False

    def choose(self, name: str, shape: torch.Size) -> Compressor:
        return self

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)

    def keeps(self, dtype: torch.dtype) -> bool:
        return False

    def add(self, total: Tensor, gradient: Tensor, weight: float, first: bool) -> None:
        Codec.add(self, total, gradient, weight, first)

    def value(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return Codec.value(self, total, dtype)

    def mean(self, total: Tensor, spans: Sequence[Span], comm: Wire, memory: Memory, dtype: torch.dtype) -> Mean:
        if comm.size == 1:  # nothing travels
            return (yield from self.candidates[0].mean(total, spans, comm, memory.part("0"), dtype))
        step: int = memory.get("step", 0)
        chosen: int | None = memory.get("chosen")
        figures: Figures | None = memory.get("figures")
        laps: tuple[_Lap, ...] = memory.get("laps", ())
        if figures is None or (self.again and step == self.again):
            step, laps = 0, ()
            figures = self._measure(total, spans, comm, dtype, chosen)
            memory.put("figures", figures)
        start, sent = comm.now(), comm.bytes_sent
        if step == self.steps:
            chosen = self._decide(figures, laps, _Lap(start, sent, sent, 0.0), comm, total, spans)
            memory.put("chosen", chosen)
            for i in range(len(self.candidates)):
                if i != chosen:
                    memory.forget(str(i))
        now = figures.first if step < self.steps or chosen is None else chosen
        steps = self.candidates[now].mean(total, spans, comm, memory.part(str(now)), dtype)
        result, blocked = yield from _watched(steps, comm)
        memory.put("step", step + 1)
        memory.put("laps", (*laps, _Lap(start, sent, comm.bytes_sent, blocked)) if step < self.steps else ())
        return result

    def _measure(
        self, total: Tensor, spans: Sequence[Span], comm: Wire, dtype: torch.dtype, chosen: int | None
    ) -> Figures:
        """The figures of arithmetic and link; waits for the peers, so that nothing but the messages is measured."""
        alone = [rehearse(repr(c), c, total, spans, comm, dtype) for c in self.candidates]
        of_all = slowest([c.arithmetic_seconds for c in alone], comm, total.device)
        candidates = [Candidate(c.name, seconds, c.messages) for c, seconds in zip(alone, of_all)]
        largest: dict[str, int] = {}
        for verb, size in (message for c in candidates for message in c.messages):
            largest[verb] = max(size, largest.get(verb, 0))
        links = {verb: fit(probe(verb, size, comm, total.device)) for verb, size in largest.items()}
        first = chosen
        if first is None:
            first = pick([forecast(c, links, Pace(0.0, 0.0)) for c in candidates], self.gain)
        return Figures(tuple(candidates), links, first)

    def _decide(
        self, figures: Figures, laps: Sequence[_Lap], now: _Lap, comm: Wire, total: Tensor, spans: Sequence[Span]
    ) -> int:
        """The candidate for the steps to come."""
        ends = [*laps[2:], now]  # other buckets have measured in the first lap
        pairs = list(zip(laps[1:], ends))
        taken = median(end.start - lap.start for lap, end in pairs)
        sent_by = [(lap.sent_after - lap.sent_before, end.sent_before - lap.sent_before) for lap, end in pairs]
        own = median(here / max(1, everywhere) for here, everywhere in sent_by)
        waited = median(lap.blocked_seconds for lap, _ in pairs)
        # Who is slowest waits least: for the link, not for others.
        figures_of_all = slowest([taken, min(1.0, max(own, 1e-6)), -waited], comm, total.device)
        decision = figures.decide(figures_of_all[0], -figures_of_all[2], figures_of_all[1], self.gain)
        if comm.rank == 0:
            LOG.info("%s of %d numbers: %s", _title(spans), total.numel(), figures.words(decision, comm.size))
        return decision.chosen


@dataclass(frozen=True)
class Decision:
    """What was chosen, and by which forecasts."""

    chosen: int
    forecasts: tuple[Forecast, ...]


@dataclass(frozen=True)
class Figures:
    """What all workers know of a bucket: its candidates, the link, and the candidate to begin with."""

    candidates: tuple[Candidate, ...]
    links: dict[str, Link]
    first: int

    def decide(self, step_seconds: float, blocked_seconds: float, share: float, gain: float) -> Decision:
        """By steps with the first candidate, see `pace`."""
        measured = pace(self.candidates[self.first], self.links, step_seconds, blocked_seconds, share)
        forecasts = tuple(forecast(c, self.links, measured) for c in self.candidates)
        return Decision(pick(forecasts, gain), forecasts)

    def words(self, decision: Decision, workers: int) -> str:
        """The decision in a sentence."""
        i = decision.chosen
        candidate, step = self.candidates[i], decision.forecasts[i]
        verb = candidate.messages[0][0] if candidate.messages else next(iter(self.links))
        link = self.links[verb]
        rate = f"{8e-6 * _CARRIES[verb](workers) / link.seconds_per_byte:.3g}" if link.seconds_per_byte else "unlimited"
        why = reason([c.name for c in self.candidates], decision.forecasts, i)
        return (
            f"{'not compressed, ' if i == 0 else ''}{candidate.name}: a step is predicted to take "
            f"{step.step_seconds * 1e3:.3g} ms ({decision.forecasts[0].step_seconds * 1e3:.3g} ms with "
            f"{self.candidates[0].name}); here {candidate.arithmetic_seconds * 1e3:.3g} ms of arithmetic and "
            f"{candidate.exchange_seconds(self.links) * 1e3:.3g} ms on a link of {rate} Mbit/s with "
            f"{link.latency_seconds * 1e3:.3g} ms of latency; {why}"
        )


@dataclass(frozen=True)
class _Lap:
    """One step of one bucket: when its mean began, the bytes that this worker had sent before and after it, and how
    long it was waited for with nothing else to do."""

    start: float
    sent_before: int
    sent_after: int
    blocked_seconds: float


class _Watched:
    """A work that knows how long it was waited for."""

    def __init__(self, work: Any, comm: Wire) -> None:
        self._work, self._comm = work, comm
        self.blocked_seconds = 0.0

    def poll(self) -> bool:
        return bool(self._work.poll())

    def wait(self) -> Any:
        start = self._comm.now()
        answer = self._work.wait()
        self.blocked_seconds += self._comm.now() - start
        return answer


def _watched(steps: Mean, comm: Wire) -> Generator[Any, Any, tuple[Tensor, float]]:
    """The mean that `steps` takes, and how long it was waited for."""
    answer, blocked = None, 0.0
    while True:
        try:
            work = _Watched(steps.send(answer), comm)
        except StopIteration as stop:
            return stop.value, blocked
        answer = yield work
        blocked += work.blocked_seconds


def _title(spans: Sequence[Span]) -> str:
    if not spans:
        return "a bucket"
    return f"{spans[0].name} to {spans[-1].name}" if len(spans) > 1 else spans[0].name
