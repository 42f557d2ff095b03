"""`Auto` chooses the compressor with the shortest step, the same on all ranks, and logs why."""

import logging

import pytest
import torch

from unisono.comm import simulate
from unisono.comm.link_model import CONTENTION
from unisono.comm.link_model import Link as Wires
from unisono.compress import Auto, Cast, Compressor, CompressorMemory, OneBit, Quantize, TopK
from unisono.compress.cost_model import (
    HIDDEN_FRACTION,
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
from unisono.sync.pending_mean import PendingMean

AUTO = Auto(steps=4)
STEPS = AUTO.steps * (len(AUTO.candidates) + 2) + 3  # until it has chosen, and some
SLOW, FAST = Wires(25e6 / 8, 1e-3), Wires(10e9 / 8, 20e-6)


def test_the_fit_passes_through_the_smallest_and_the_largest_message() -> None:
    link = fit([(1000, 0.011), (3000, 0.5), (5000, 0.015)])
    assert link.latency_seconds == pytest.approx(0.01)
    assert link.seconds(2000) == pytest.approx(0.012)


@pytest.mark.parametrize("points", [[(8, 0.5)], [(8, 0.5), (800, 0.1)]])
def test_a_link_without_a_measurable_rate_is_all_latency(points) -> None:
    assert fit(points) == LinkCost(0.5, 0.0)


@pytest.mark.parametrize("exchange", [0.0, 0.04, 5.0])
@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("hidden", [0.0, 0.02])
def test_the_overlap_is_recovered_from_the_step_that_it_forecasts(exchange, share, hidden) -> None:
    candidate, links = Candidate("c", 0.01, (("sum", 1000),)), {"sum": LinkCost(0.0, exchange / 1000)}
    step = forecast(candidate, links, OverlapModel(0.3, hidden, share)).step_seconds
    blocked = max(0.0, exchange - hidden)
    found = measured_overlap(candidate, links, step, blocked, share)
    assert found.computing_seconds == pytest.approx(0.3)
    if blocked:
        assert found.hidden_seconds == pytest.approx(hidden)


def test_without_a_wait_half_of_the_computing_is_assumed_to_overlap() -> None:
    small, links = Candidate("c", 0.0, (("sum", 1000),)), {"sum": LinkCost(0.0, 1e-6)}
    assert measured_overlap(small, links, 0.1, 0.0, 0.5) == OverlapModel(0.1, HIDDEN_FRACTION * 0.1 * 0.5, 0.5)


CANDIDATES = [
    Candidate("as it is", 0.0, (("sum", 4_000_000),)),
    Candidate("half", 0.001, (("sum", 2_000_000),)),
    Candidate("an eighth", 0.010, (("exchange", 500_000), ("gather", 125_000))),
]


@pytest.mark.parametrize(
    ("seconds_per_byte", "compute", "chosen"),
    [
        (1e-10, 0.1, 0),  # nothing to gain
        (1e-8, 0.1, 0),  # 40 ms are hidden behind 50
        (1e-8, 0.0, 2),  # nothing hides 40 ms
        (2.4e-8, 0.1, 1),  # 96 ms are not hidden, 48 are
        (1e-6, 0.1, 2),
    ],
)
def test_it_does_not_compress_where_that_saves_no_time(seconds_per_byte, compute, chosen) -> None:
    links = dict.fromkeys(("sum", "exchange", "gather"), LinkCost(1e-4, seconds_per_byte))
    steps = [forecast(c, links, OverlapModel(compute, HIDDEN_FRACTION * compute)).step_seconds for c in CANDIDATES]
    assert pick(steps, 0.1) == chosen


def test_a_less_accurate_candidate_has_to_save_the_gain() -> None:
    assert [pick([1000, 950, 880, 870], gain) for gain in (0.0, 0.1, 0.2)] == [3, 2, 0]


@pytest.mark.parametrize(
    ("seconds", "tried"),
    [
        ([1.0, 1.0, 1.0], (0, 1, 2, 0)),
        ([1.4, 1.0, 1.6], (0, 1, 1, 1)),  # the last is out of the question
        ([9.0, 2.0, 1.0], (2, 2, 2, 2)),
    ],
)
def test_a_candidate_with_a_long_forecast_is_not_tried(seconds, tried) -> None:
    assert trial_order([CandidateCost(0.0, 0.0, each) for each in seconds], 0.1) == tried


def train(comm, compress: Compressor, compute: float, numel: int, steps: int, drop: int = -1) -> list[float]:
    """The choice, and the last duration, of a loop that computes and takes the means of two buckets."""
    memories, durations = [CompressorMemory(), CompressorMemory()], []
    for step in range(steps):
        start = comm.now()
        for attempt in range(1 + (step == drop)):
            for memory in memories:
                memory.discard()
                total = torch.randn(numel, generator=torch.Generator().manual_seed(10 * comm.rank + step))
                comm.compute(compute / 2)
                got = PendingMean(compress.mean(total, (), comm, memory, torch.float32)).wait()
                assert got.shape == total.shape
            del attempt
        for memory in memories:
            memory.commit()
        durations.append(comm.now() - start)
    assert all(m.get("chosen") == memories[0].get("chosen") for m in memories)
    return [memories[0].get("chosen"), durations[-1]]


@pytest.mark.short(4)
@pytest.mark.parametrize(("link", "uncompressed"), [(SLOW, False), (FAST, True)])
@pytest.mark.parametrize("drop", [-1, 0, 3, 6, STEPS - 3])
def test_all_workers_choose_alike_whatever_step_is_dropped(link, uncompressed, drop) -> None:
    results = simulate(3, train, AUTO, 0.05, 50_000, STEPS, drop, link=link)
    chosen = [result[0] for result in results]
    assert len(set(chosen)) == 1
    assert (chosen[0] == 0) is uncompressed


@pytest.mark.short(1)
@pytest.mark.parametrize("link", [SLOW, Wires(100e6 / 8, 1e-3), Wires(1e9 / 8, 1e-4), FAST])
def test_it_is_as_fast_as_the_best_fixed_choice(link) -> None:
    """On the virtual clock, where arithmetic takes no time: within the gain."""
    fixed = [simulate(3, train, c, 0.02, 50_000, 2, link=link)[0][1] for c in AUTO.candidates]
    own = simulate(3, train, AUTO, 0.02, 50_000, STEPS, link=link)[0][1]
    assert own <= 1.15 * min(fixed)


def test_it_measures_again_and_follows_a_link_that_changed() -> None:
    def changed(comm) -> tuple[int, int]:
        compress, memory, seen = Auto(steps=4, again=STEPS), CompressorMemory(), []
        for step in range(3 * STEPS):
            if step == STEPS:
                comm.world.links[:] = [FAST] * comm.size
            comm.compute(0.05)
            total = torch.randn(50_000, generator=torch.Generator().manual_seed(step))
            PendingMean(compress.mean(total, (), comm, memory, torch.float32)).wait()
            memory.commit()
            seen.append(memory.get("chosen"))
        return seen[STEPS - 1], seen[-1]

    for before, after in simulate(2, changed, link=SLOW):
        assert before > 0
        assert after == 0


def test_each_decision_is_logged_with_its_measurements(caplog) -> None:
    with caplog.at_level(logging.INFO, logger="unisono"):
        simulate(3, train, AUTO, 0.05, 50_000, STEPS, link=SLOW)
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2  # one for each bucket, by one worker
    assert "a bucket of 50000 numbers: " in messages[0]
    assert f"{25 / CONTENTION:.3g} Mbit/s" in messages[0]  # what all to all gets out of it
    for word in ("ms of latency", "ms of arithmetic", "a step takes", "would take", " took "):
        assert word in messages[0]


def test_residuals_of_other_candidates_are_removed_with_the_choice() -> None:
    def parts(comm) -> set[str]:
        memory = CompressorMemory()
        for step in range(STEPS):
            total = torch.randn(1000, generator=torch.Generator().manual_seed(step))
            PendingMean(AUTO.mean(total, (), comm, memory, torch.float32)).wait()
            memory.commit()
        return set(memory._parts) - {str(memory.get("chosen"))}

    assert simulate(2, parts) == [set(), set()]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Auto(()), "candidates"),
        (lambda: Auto((OneBit,)), "not a compressor"),
        (lambda: Auto((Cast(), __import__("unisono.compress").compress.Exact())), "does not sum"),
        (lambda: Auto(gain=1.0), "gain=1.0"),
        (lambda: Auto(steps=2), "steps=2"),
        (lambda: Auto(again=42), "above the 42 steps"),
        (lambda: Auto((Quantize(8), TopK(0.01)), fixed=3), "not a compressor"),
    ],
)
def test_invalid_arguments_are_refused_by_name(build, words) -> None:
    with pytest.raises(ValueError, match=words):
        build()
