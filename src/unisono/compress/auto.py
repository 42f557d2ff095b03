"""Measures link and arithmetic, and picks the compressor with the shortest step; often that is none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from unisono.compress.cast import Cast
from unisono.compress.compressor import Codec, CollectiveVerbs, Compressor, Mean
from unisono.compress.cost_model import (
    Candidate,
    CandidateCost,
    LinkCost,
    OverlapModel,
    fit,
    forecast,
    measured_overlap,
    pick,
    trial_order,
)
from unisono.compress.delegate import Delegate, check_compressor
from unisono.compress.dry_run import dry_run
from unisono.compress.link_probe import probe, slowest
from unisono.compress.memory import CompressorMemory
from unisono.compress.power_sgd import PowerSGD
from unisono.compress.quantize import Quantize
from unisono.compress.span import Span

LOG = logging.getLogger("unisono")

_LINK_BYTES: dict[str, Callable[[int], float]] = {  # bytes on a worker's link per byte of its input, for n workers
    "sum": lambda n: 2 * (n - 1) / n,
    "gather": lambda n: n - 1,
    "exchange": lambda n: (n - 1) / n,
}


@dataclass(frozen=True)
class Auto(Delegate):
    """Picks, for each bucket, the compressor among `candidates` with which a step is shortest.

    1. In its first step, a bucket runs every candidate on its own numbers without peers, which measures the arithmetic
       and the messages. It also sends messages of growing size, which measures latency and rate of each operation.
    2. For `steps` steps, the bucket uses the candidate that would be fastest without overlap, and measures steps and
       waits. From these, `forecast` predicts the step with each candidate. All measurements are those of the slowest
       worker.
    3. Forecasts do not include workers that share a processor, or other traffic on the link. So candidates that are
       not ruled out are tried in all buckets, one after the other, for `steps` steps each. In the last round, each
       bucket uses the candidate with its best forecast.

    The candidate with the shortest step is chosen. All workers have the same measurements, and so choose alike. A
    candidate must save the fraction `gain` of a step against all candidates before it, so list the most accurate first.
    After `again` steps everything is measured again. Worker 0 logs every decision.

    Parameter servers and gossip do not use `mean`, and need messages of a fixed length. They use `fixed`.

    Args:
        candidates: compressors to choose from, the most accurate first. The default ones hardly affect convergence;
            `OneBit` and `TopK` send less, and may need more steps than they save.
        fixed: the compressor where `mean` is not used.
        gain: the least fraction of a step that a less accurate candidate has to save.
        steps: the number of steps of each trial round, at least 4.
        again: the number of steps from one measurement to the next; 0 measures once.

    Raises:
        ValueError: there are no candidates; a candidate or `fixed` is not a compressor, or does not sum in fp32
            (`Exact`); `gain` is outside 0..1; `steps` is below 4; `again` is neither 0 nor above the steps of
            measuring.
    """

    candidates: tuple[Compressor, ...] = (Cast(), Cast("bf16"), Quantize(8), Quantize(4), PowerSGD(4))
    fixed: Compressor = Quantize(8)
    gain: float = 0.05
    steps: int = 6
    again: int = 1000

    def __post_init__(self) -> None:
        if not isinstance(self.candidates, tuple) or not self.candidates:
            raise ValueError(f"candidates={self.candidates!r} is not a tuple of compressors")
        for candidate in (*self.candidates, self.fixed):
            check_compressor("candidates", candidate)
            if candidate.total_dtype(torch.float32) != torch.float32:
                raise ValueError(f"candidates: {candidate!r} does not sum gradients of fp32 in fp32, as all have to")
        if not 0 <= self.gain < 1:
            raise ValueError(f"gain={self.gain!r} is not a number from 0 to below 1")
        if not isinstance(self.steps, int) or self.steps < 4:
            raise ValueError(f"steps={self.steps!r} is not a whole number from 4")
        measuring = self.steps * (len(self.candidates) + 2)
        if not isinstance(self.again, int) or (self.again != 0 and self.again <= measuring):
            raise ValueError(f"again={self.again!r} is neither 0 nor above the {measuring} steps that measuring takes")

    @property
    def inner(self) -> Compressor:
        return self.fixed

    @property
    def is_additive(self) -> bool:
        return False

    def choose(self, name: str, shape: torch.Size) -> Compressor:
        return self

    def is_one_sum(self, memory: CompressorMemory) -> bool:
        trial: BucketTrial | None = memory.get("trial")
        if trial is None or self._restarts(trial) or trial.is_over(self.steps):  # `mean` measures or decides first
            return False
        now = trial.candidate(self.steps)
        return self.candidates[now].is_one_sum(memory.part(str(now)))

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)

    def is_lossless(self, dtype: torch.dtype) -> bool:
        return False

    def add(self, total: Tensor, gradient: Tensor, weight: float, first: bool) -> None:
        Codec.add(self, total, gradient, weight, first)

    def value(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return Codec.value(self, total, dtype)

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        if comm.size == 1:  # nothing is sent
            return (yield from self.candidates[0].mean(total, spans, comm, memory.part("0"), dtype))
        trial: BucketTrial | None = memory.get("trial")
        if trial is None or self._restarts(trial):
            trial = self._measure(total, spans, comm, dtype, memory.get("chosen"))
        start, sent = comm.now(), comm.bytes_sent
        if trial.is_over(self.steps):
            trial = self._advance(trial, _StepTiming(start, sent, sent, 0.0), comm, total, spans)
            memory.put("chosen", trial.chosen)
            for i in range(len(self.candidates)):
                if trial.chosen not in (None, i):
                    memory.forget(str(i))
        now = trial.candidate(self.steps)
        steps = self.candidates[now].mean(total, spans, comm, memory.part(str(now)), dtype)
        result, blocked = yield from _timed(steps, comm)
        memory.put("trial", trial.after(_StepTiming(start, sent, comm.bytes_sent, blocked)))
        return result

    def _restarts(self, trial: BucketTrial) -> bool:
        """Whether everything is measured again in this step."""
        return trial.step == self.again > 0

    def _measure(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, dtype: torch.dtype, chosen: int | None
    ) -> BucketTrial:
        """Collective: measure arithmetic and link. Blocks, so that nothing else is in flight."""
        local = [dry_run(repr(c), c, total, spans, comm, dtype) for c in self.candidates]
        maxima = slowest([c.arithmetic_seconds for c in local], comm, total.device)
        candidates = [Candidate(c.name, seconds, c.messages) for c, seconds in zip(local, maxima)]
        largest: dict[str, int] = {}
        for verb, size in (message for c in candidates for message in c.messages):
            largest[verb] = max(size, largest.get(verb, 0))
        links = {verb: fit(probe(verb, size, comm, total.device)) for verb, size in largest.items()}
        first = chosen
        if first is None:
            first = pick([forecast(c, links, OverlapModel(0.0, 0.0)).step_seconds for c in candidates], self.gain)
        return BucketTrial(Measurements(tuple(candidates), links), (first,))

    def _advance(
        self, trial: BucketTrial, now: _StepTiming, comm: CollectiveVerbs, total: Tensor, spans: Sequence[Span]
    ) -> BucketTrial:
        """Collective: after the first round, plan the other rounds; after the last round, choose a candidate."""
        measurements = trial.measurements
        if not trial.forecasts:
            timings = [*trial.timings[1:], now]  # without the first step, in which other buckets measured candidates
            pairs = list(pairwise(timings))
            step = median(end.start - timing.start for timing, end in pairs)
            own = median(
                (timing.sent_after - timing.sent_before) / max(1, end.sent_before - timing.sent_before)
                for timing, end in pairs
            )
            waited = median(timing.blocked_seconds for timing, _ in pairs)
            # The slowest worker waits least: for the link, not for other workers.
            step, own, waited = slowest([step, min(1.0, max(own, 1e-6)), -waited], comm, total.device)
            forecasts = measurements.forecasts(trial.rounds[0], step, -waited, own)
            return replace(trial, forecasts=forecasts, rounds=(trial.rounds[0], *trial_order(forecasts, self.gain)))
        starts = [*(timing.start for timing in trial.timings), now.start]
        # The first step of a round is left out: it still finishes exchanges of the round before.
        medians = [
            median(_differences(starts[i + 1 : i + self.steps + 1])) for i in range(0, len(trial.timings), self.steps)
        ]
        taken = slowest(medians[1:], comm, total.device)
        trial = replace(trial, taken=tuple(taken), chosen=trial.rounds[1 + pick(taken, self.gain)])
        if comm.rank == 0:
            LOG.info("%s of %d numbers: %s", _title(spans), total.numel(), trial.sentence(comm.size))
        return trial


@dataclass(frozen=True)
class _StepTiming:
    """The timing of the mean of one bucket in one step.

    Args:
        start: the time at which the mean began, by the clock of the communicator.
        sent_before, sent_after: the bytes that this worker had sent before and after the mean.
        blocked_seconds: how long this worker was blocked while it waited for the mean.
    """

    start: float
    sent_before: int
    sent_after: int
    blocked_seconds: float


@dataclass(frozen=True)
class Measurements:
    """What is measured of a bucket before its trial: the cost of its candidates, and the link. Equal on all workers."""

    candidates: tuple[Candidate, ...]
    links: dict[str, LinkCost]

    def forecasts(
        self, current: int, step_seconds: float, blocked_seconds: float, share: float
    ) -> tuple[CandidateCost, ...]:
        """The forecast for each candidate, from steps with candidate `current`; see `measured_overlap`."""
        overlap = measured_overlap(self.candidates[current], self.links, step_seconds, blocked_seconds, share)
        return tuple(forecast(c, self.links, overlap) for c in self.candidates)


@dataclass(frozen=True)
class BucketTrial:
    """The progress of a bucket towards its choice of a candidate.

    Attributes:
        rounds: the index of the candidate in each planned round. At first only the first round is planned, later all.
        timings: the timings of the steps so far; empty once the choice is made.
        forecasts: the forecasts for all candidates; empty until the first round is complete.
        taken: the median seconds of a step in each round after the first, on the slowest worker.
        chosen: the index of the chosen candidate; None: there is no choice yet.
        step: the number of steps since the trial began.
    """

    measurements: Measurements
    rounds: tuple[int, ...]
    timings: tuple[_StepTiming, ...] = ()
    forecasts: tuple[CandidateCost, ...] = ()
    taken: tuple[float, ...] = ()
    chosen: int | None = None
    step: int = 0

    def is_over(self, steps: int) -> bool:
        """Whether all planned rounds are complete, and nothing is chosen yet."""
        return self.chosen is None and self.step == steps * len(self.rounds)

    def candidate(self, steps: int) -> int:
        """The index of the candidate for the next step."""
        return self.rounds[self.step // steps] if self.chosen is None else self.chosen

    def after(self, timing: _StepTiming) -> BucketTrial:
        """The trial after one more step."""
        timings = (*self.timings, timing) if self.chosen is None else ()
        return replace(self, step=self.step + 1, timings=timings)

    def sentence(self, workers: int) -> str:
        """The choice and its reasons as one sentence, for the log."""
        i, candidates, links = self.chosen, self.measurements.candidates, self.measurements.links
        assert i is not None, "nothing is chosen yet"
        candidate = candidates[i]
        verb = candidate.messages[0][0] if candidate.messages else next(iter(links))
        link = links[verb]
        rate = (
            f"{8e-6 * _LINK_BYTES[verb](workers) / link.seconds_per_byte:.3g}" if link.seconds_per_byte else "unlimited"
        )
        alternatives = [self._alternative(k) for k in range(len(candidates)) if k != i]
        return (
            f"{'not compressed, ' if i == 0 else ''}{candidate.name}: a step takes {self._seconds(i) * 1e3:.3g} ms; "
            f"here {candidate.arithmetic_seconds * 1e3:.3g} ms of arithmetic and "
            f"{candidate.exchange_seconds(links) * 1e3:.3g} ms on a link of {rate} Mbit/s with "
            f"{link.latency_seconds * 1e3:.3g} ms of latency; {', '.join(alternatives) or 'no other candidate'}"
        )

    def _seconds(self, i: int) -> float:
        """The shortest measured step with candidate `i`, else its forecast."""
        measured = [taken for candidate, taken in zip(self.rounds[1:], self.taken) if candidate == i]
        return min(measured, default=self.forecasts[i].step_seconds)

    def _alternative(self, i: int) -> str:
        verb = "took" if i in self.rounds[1:] else "would take"
        return f"{self.measurements.candidates[i].name} {verb} {self._seconds(i) * 1e3:.3g} ms"


class _TimedWork:
    """A work that measures how long `wait` blocks."""

    def __init__(self, work: Any, comm: CollectiveVerbs) -> None:
        self._work, self._comm = work, comm
        self.blocked_seconds = 0.0

    def poll(self) -> bool:
        return bool(self._work.poll())

    def wait(self) -> Any:
        start = self._comm.now()
        result = self._work.wait()
        self.blocked_seconds += self._comm.now() - start
        return result


def _timed(steps: Mean, comm: CollectiveVerbs) -> Generator[Any, Any, tuple[Tensor, float]]:
    """Run `steps`; returns the mean, and the seconds for which its waits blocked."""
    received, blocked = None, 0.0
    while True:
        try:
            work = _TimedWork(steps.send(received), comm)
        except StopIteration as stop:
            return stop.value, blocked
        received = yield work
        blocked += work.blocked_seconds


def _title(spans: Sequence[Span]) -> str:
    if not spans:
        return "a bucket"
    return f"{spans[0].name} to {spans[-1].name}" if len(spans) > 1 else spans[0].name


def _differences(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]
