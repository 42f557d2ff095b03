"""Measure the link and the arithmetic, and pick what makes a step shortest; often that is not to compress."""

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
    heats,
    pace,
    pick,
)
from unisono.compress.delegate import Delegate, check_compressor
from unisono.compress.dry_run import rehearse
from unisono.compress.link_probe import probe, slowest
from unisono.compress.memory import CompressorMemory
from unisono.compress.power_sgd import PowerSGD
from unisono.compress.quantize import Quantize
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
    takes with each candidate in this bucket. What it cannot know (workers that share a processor, a link that others
    load) a trial shows: the candidates that it does not rule out are tried in all buckets, one after the other, for
    `steps` steps each, and at last what it holds best for each bucket by itself. The shortest step wins. All workers
    know the same figures, and so decide alike. A candidate is taken only where the step is shorter by `gain` than with
    the ones before it: list the most faithful first. After `again` steps all is measured again. Every decision is one
    sentence in the log, by worker 0.

    What has no `mean` (servers, gossip) needs messages of one length that is known beforehand: there, this is `fixed`.

    Args:
        candidates: compressors to choose from, the most faithful first. By default those that lose next to nothing of
            what is learned; `OneBit` and `TopK` send less, and may need more steps than they save.
        fixed: what it is where there is no `mean`.
        gain: least part of a step that a less faithful candidate has to save.
        steps: steps for which each is tried, at least 4.
        again: steps from one measurement to the next; 0 measures once.

    Raises:
        ValueError: no candidates; one that is no compressor, or that sums in another type than the others (`Exact`);
            `gain` outside 0..1; `steps` below 4; `again` neither 0 nor more steps than measuring takes.
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
        if not isinstance(self.steps, int) or self.steps < 4:
            raise ValueError(f"steps={self.steps!r} is not a whole number from 4")
        measuring = self.steps * (len(self.candidates) + 2)
        if not isinstance(self.again, int) or (self.again != 0 and self.again <= measuring):
            raise ValueError(f"again={self.again!r} is neither 0 nor above the {measuring} steps that measuring takes")

    @property
    def stands_for(self) -> Compressor:
        return self.fixed

    @property
    def adds_up(self) -> bool:
        return False

    def choose(self, name: str, shape: torch.Size) -> Compressor:
        return self

    def is_one_sum(self, memory: CompressorMemory) -> bool:
        trial: BucketTrial | None = memory.get("trial")
        if trial is None or self._starts(trial) or trial.is_over(self.steps):  # there is to be measured or decided
            return False
        now = trial.candidate(self.steps)
        return self.candidates[now].is_one_sum(memory.part(str(now)))

    def total_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)

    def keeps(self, dtype: torch.dtype) -> bool:
        return False

    def add(self, total: Tensor, gradient: Tensor, weight: float, first: bool) -> None:
        Codec.add(self, total, gradient, weight, first)

    def value(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return Codec.value(self, total, dtype)

    def mean(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, memory: CompressorMemory, dtype: torch.dtype
    ) -> Mean:
        if comm.size == 1:  # nothing travels
            return (yield from self.candidates[0].mean(total, spans, comm, memory.part("0"), dtype))
        trial: BucketTrial | None = memory.get("trial")
        if trial is None or self._starts(trial):
            trial = self._measure(total, spans, comm, dtype, memory.get("chosen"))
        start, sent = comm.now(), comm.bytes_sent
        if trial.is_over(self.steps):
            trial = self._go_on(trial, _Lap(start, sent, sent, 0.0), comm, total, spans)
            memory.put("chosen", trial.chosen)
            for i in range(len(self.candidates)):
                if trial.chosen not in (None, i):
                    memory.forget(str(i))
        now = trial.candidate(self.steps)
        steps = self.candidates[now].mean(total, spans, comm, memory.part(str(now)), dtype)
        result, blocked = yield from _watched(steps, comm)
        memory.put("trial", trial.after(_Lap(start, sent, comm.bytes_sent, blocked)))
        return result

    def _starts(self, trial: BucketTrial) -> bool:
        """Whether all is measured again."""
        return trial.step == self.again > 0

    def _measure(
        self, total: Tensor, spans: Sequence[Span], comm: CollectiveVerbs, dtype: torch.dtype, chosen: int | None
    ) -> BucketTrial:
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
            first = pick([forecast(c, links, OverlapModel(0.0, 0.0)).step_seconds for c in candidates], self.gain)
        return BucketTrial(Figures(tuple(candidates), links), (first,))

    def _go_on(
        self, trial: BucketTrial, now: _Lap, comm: CollectiveVerbs, total: Tensor, spans: Sequence[Span]
    ) -> BucketTrial:
        """The heats that follow the first, or the decision that follows the last."""
        figures = trial.figures
        if not trial.forecasts:
            laps = [*trial.laps[1:], now]  # other buckets have measured in the first lap
            pairs = list(pairwise(laps))
            step = median(end.start - lap.start for lap, end in pairs)
            own = median(
                (lap.sent_after - lap.sent_before) / max(1, end.sent_before - lap.sent_before) for lap, end in pairs
            )
            waited = median(lap.blocked_seconds for lap, _ in pairs)
            # Who is slowest waits least: for the link, not for others.
            step, own, waited = slowest([step, min(1.0, max(own, 1e-6)), -waited], comm, total.device)
            forecasts = figures.forecasts(trial.heats[0], step, -waited, own)
            return replace(trial, forecasts=forecasts, heats=(trial.heats[0], *heats(forecasts, self.gain)))
        starts = [*(lap.start for lap in trial.laps), now.start]
        # Its first step still ends what the heat before has begun.
        seen = [median(_differences(starts[i + 1 : i + self.steps + 1])) for i in range(0, len(trial.laps), self.steps)]
        taken = slowest(seen[1:], comm, total.device)
        trial = replace(trial, taken=tuple(taken), chosen=trial.heats[1 + pick(taken, self.gain)])
        if comm.rank == 0:
            LOG.info("%s of %d numbers: %s", _title(spans), total.numel(), trial.words(comm.size))
        return trial


@dataclass(frozen=True)
class _Lap:
    """One step of one bucket: when its mean began, the bytes that this worker had sent before and after it, and how
    long it was waited for with nothing else to do."""

    start: float
    sent_before: int
    sent_after: int
    blocked_seconds: float


@dataclass(frozen=True)
class Figures:
    """What all workers know of a bucket before anything is tried: its candidates, and the link."""

    candidates: tuple[Candidate, ...]
    links: dict[str, LinkCost]

    def forecasts(
        self, begun: int, step_seconds: float, blocked_seconds: float, share: float
    ) -> tuple[CandidateCost, ...]:
        """A step with each candidate, by steps that took so long with candidate `begun`, see `pace`."""
        measured = pace(self.candidates[begun], self.links, step_seconds, blocked_seconds, share)
        return tuple(forecast(c, self.links, measured) for c in self.candidates)


@dataclass(frozen=True)
class BucketTrial:
    """How far a bucket is on its way to a choice.

    Attributes:
        heats: candidates that are tried, of those heats that are settled: the first one, then all.
        laps: steps so far; none is kept once the choice is made.
        forecasts: of all candidates, by the first heat.
        taken: median seconds of a step in each heat after the first, on the slowest worker.
        chosen: the candidate from now on.
        step: steps since the trial began.
    """

    figures: Figures
    heats: tuple[int, ...]
    laps: tuple[_Lap, ...] = ()
    forecasts: tuple[CandidateCost, ...] = ()
    taken: tuple[float, ...] = ()
    chosen: int | None = None
    step: int = 0

    def is_over(self, steps: int) -> bool:
        """Whether the heats that are settled have been run, and more is to be decided."""
        return self.chosen is None and self.step == steps * len(self.heats)

    def candidate(self, steps: int) -> int:
        """Whose turn it is."""
        return self.heats[self.step // steps] if self.chosen is None else self.chosen

    def after(self, lap: _Lap) -> BucketTrial:
        """One step later."""
        laps = (*self.laps, lap) if self.chosen is None else ()
        return replace(self, step=self.step + 1, laps=laps)

    def words(self, workers: int) -> str:
        """The decision in a sentence."""
        i, candidates, links = self.chosen, self.figures.candidates, self.figures.links
        assert i is not None, "nothing is chosen yet"
        candidate = candidates[i]
        verb = candidate.messages[0][0] if candidate.messages else next(iter(links))
        link = links[verb]
        rate = f"{8e-6 * _CARRIES[verb](workers) / link.seconds_per_byte:.3g}" if link.seconds_per_byte else "unlimited"
        rivals = [self._rival(k) for k in range(len(candidates)) if k != i]
        return (
            f"{'not compressed, ' if i == 0 else ''}{candidate.name}: a step takes {self._seconds(i) * 1e3:.3g} ms; "
            f"here {candidate.arithmetic_seconds * 1e3:.3g} ms of arithmetic and "
            f"{candidate.exchange_seconds(links) * 1e3:.3g} ms on a link of {rate} Mbit/s with "
            f"{link.latency_seconds * 1e3:.3g} ms of latency; {', '.join(rivals) or 'there is no other candidate'}"
        )

    def _seconds(self, i: int) -> float:
        """The shortest step that was seen with candidate `i`, or its forecast."""
        seen = [taken for tried, taken in zip(self.heats[1:], self.taken) if tried == i]
        return min(seen, default=self.forecasts[i].step_seconds)

    def _rival(self, i: int) -> str:
        tried = i in self.heats[1:]
        return f"{self.figures.candidates[i].name} {'took' if tried else 'would take'} {self._seconds(i) * 1e3:.3g} ms"


class _TimedWork:
    """A work that knows how long it was waited for."""

    def __init__(self, work: Any, comm: CollectiveVerbs) -> None:
        self._work, self._comm = work, comm
        self.blocked_seconds = 0.0

    def poll(self) -> bool:
        return bool(self._work.poll())

    def wait(self) -> Any:
        start = self._comm.now()
        answer = self._work.wait()
        self.blocked_seconds += self._comm.now() - start
        return answer


def _watched(steps: Mean, comm: CollectiveVerbs) -> Generator[Any, Any, tuple[Tensor, float]]:
    """The mean that `steps` takes, and how long it was waited for."""
    answer, blocked = None, 0.0
    while True:
        try:
            work = _TimedWork(steps.send(answer), comm)
        except StopIteration as stop:
            return stop.value, blocked
        answer = yield work
        blocked += work.blocked_seconds


def _title(spans: Sequence[Span]) -> str:
    if not spans:
        return "a bucket"
    return f"{spans[0].name} to {spans[-1].name}" if len(spans) > 1 else spans[0].name


def _differences(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]
