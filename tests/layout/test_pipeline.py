"""A model split into stages trains as the unsplit model does."""

from __future__ import annotations

import importlib.util
import inspect
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.layout.pipelines import (
    Branching,
    Case,
    Positions,
    Remembering,
    Residual,
    batch,
    build,
    call,
    gpt,
    whole,
    work,
)
from tests.support.processes import run
from unisono.errors import InvalidInput
from unisono.layout.pipeline import (
    SCHEDULES,
    balance,
    balance_workers,
    by_name,
    check,
    cut_points,
    measure_segments,
    split,
    stages_for,
    stages_of,
)

RAGGED = (2, 2, 2, 2, 1)

TWO = [
    *(Case("gpt", schedule, optimizer) for schedule in SCHEDULES for optimizer in ("sgd", "adamw")),
    *(Case("tied", schedule) for schedule in ("GPipe", "Interleaved1F1B", "ZBVZeroBubble")),
    Case("tied", "1F1B", cuts=("blocks.2",)),
    *(Case("cnn", schedule) for schedule in ("GPipe", "1F1B", "LoopedBFS", "DualPipeV")),
    *(Case("shared", schedule) for schedule in ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")),
    *(Case("skips", schedule, cuts=("third",)) for schedule in ("GPipe", "1F1B")),
    *(Case("skips", schedule, cuts=("second", "third", "fourth")) for schedule in ("Interleaved1F1B", "DualPipeV")),
    *(Case("frozen", schedule) for schedule in ("1F1B", "InterleavedZeroBubble")),
    *(Case("positions", schedule, "adamw") for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")),
    Case("residual", "1F1B", lengths=(8, 5, 16)),
    *(Case("remembering", s, cuts=("blocks.1", "blocks.2", "blocks.3")) for s in ("Interleaved1F1B", "ZBVZeroBubble")),
    *(Case("lstm", schedule) for schedule in ("1F1B", "LoopedBFS", "DualPipeV")),
    *(Case("gpt", schedule, lengths=(8, 5, 16, 8)) for schedule in ("1F1B", "Interleaved1F1B", "DualPipeV")),
    *(Case("gpt", schedule, sizes=RAGGED) for schedule in ("GPipe", "1F1B")),
    *(Case("llama", s, "adamw") for s in ("1F1B", "ZBVZeroBubble") if importlib.util.find_spec("transformers")),
    Case("gpt", "DualPipeV", sizes=RAGGED, lengths=(8, 6)),
]
FOUR = [
    *(Case("gpt", schedule, optimizer) for schedule in ("GPipe", "1F1B") for optimizer in ("sgd", "adamw")),
    Case("tied", "1F1B"),
    Case("positions", "1F1B"),
    Case("cnn", "1F1B"),
    Case("skips", "GPipe", cuts=("second", "third", "fourth")),
    Case("lstm", "GPipe"),
    Case("gpt", "1F1B", lengths=(8, 5), sizes=RAGGED),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, Case], list[Any]]:
    """What each worker of each case came to; all cases of one size share their processes."""
    found = {}
    for size, cases in ((2, TWO), (4, FOUR)):
        store = tmp_path_factory.mktemp("pipeline") / "store"
        for case, pieces in zip(cases, zip(*run(size, work, str(store), cases, timeout_seconds=150)), strict=True):
            found[size, case] = list(pieces)
    return found


@pytest.mark.short(4)
@pytest.mark.parametrize(("size", "case"), [(2, c) for c in TWO] + [(4, c) for c in FOUR], ids=str)
def test_stages_train_as_the_whole_model(results: dict[Any, Any], size: int, case: Case) -> None:
    losses, state = whole(case)
    last = [steps for steps, *_ in results[size, case] if steps[0] is not None]
    assert len(last) == 1, "losses come out on one worker"
    assert torch.tensor(last[0]) == pytest.approx(torch.tensor(losses), abs=2e-6)
    seen: dict[str, Tensor] = {}
    for _, part, _, _ in results[size, case]:
        for name, tensor in part.items():
            if case.optimizer == "sgd":  # Adam makes a step of rounding errors where a gradient is zero
                torch.testing.assert_close(tensor, state[name], atol=1e-5, rtol=1e-4)
            assert torch.equal(seen.setdefault(name, tensor), tensor), "tied parameters stay equal"
    assert set(seen) == set(state)
    counted = [name for *_, names in results[size, case] for name in names]
    assert sorted(counted) == sorted(name for name, _ in build(case).named_parameters())


@pytest.mark.parametrize(("size", "case"), [(2, c) for c in TWO] + [(4, c) for c in FOUR], ids=str)
def test_evaluation_gives_the_outputs_on_the_last_worker(results: dict[Any, Any], size: int, case: Case) -> None:
    model, (outputs,) = build(case), [found for _, _, found, _ in results[size, case] if found is not None]
    state = {name: tensor for _, part, _, _ in results[size, case] for name, tensor in part.items()}
    model.load_state_dict(state)
    model.eval()
    for (inputs, _), output in zip(batch(case, 0), outputs, strict=True):
        with torch.no_grad():
            expected = call(model, inputs)
        assert type(output) is type(expected)
        if not isinstance(output, Tensor):
            output, expected = output["logits"], expected["logits"]
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)


costs = st.lists(st.integers(0, 20), min_size=1, max_size=8)


@given(costs, st.data())
def test_balance_is_as_good_as_the_best_of_all_cuts(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    weight = data.draw(st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)))
    limit = data.draw(st.none() | st.integers(0, 30))

    def sums(cuts: tuple[int, ...], values: list[int]) -> list[int]:
        return [sum(values[a:b]) for a, b in zip((0, *cuts), (*cuts, len(values)))]

    allowed = [
        cuts
        for cuts in combinations(range(1, len(costs)), stages - 1)
        if limit is None or max(sums(cuts, weight)) <= limit
    ]
    if not allowed:
        with pytest.raises(InvalidInput, match="no cut"):
            balance(costs, stages, bytes=weight, limit=limit)
        return
    found = balance(costs, stages, bytes=weight, limit=limit)
    assert found in allowed
    assert max(sums(found, costs)) == min(max(sums(cuts, costs)) for cuts in allowed)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 3), st.integers(1, 40))
def test_a_number_of_micro_batches_is_refused_with_the_nearest_that_works(
    schedule: str, workers: int, turns: int, micro_batches: int
) -> None:
    stages = workers * turns if "Looped" in schedule or "Inter" in schedule else stages_for(schedule, workers)
    try:
        check(schedule, workers, stages, micro_batches)
    except InvalidInput as refused:
        near = int(refused.cure.split()[1])
        check(schedule, workers, stages, near)
        for other in range(max(1, micro_batches - abs(near - micro_batches) + 1), micro_batches):
            with pytest.raises(InvalidInput):
                check(schedule, workers, stages, other)


@pytest.mark.parametrize(
    ("schedule", "stages", "near"), [("1F1B", 8, "4"), ("ZBVZeroBubble", 4, "8"), ("LoopedBFS", 6, "8")]
)
def test_a_number_of_stages_that_the_schedule_cannot_place_is_refused(schedule: str, stages: int, near: str) -> None:
    with pytest.raises(InvalidInput, match=f"cut into {near}"):
        check(schedule, 4, stages, 8)


def test_a_schedule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidInput, match="1F1B"):
        check("2F2B", 2, 2, 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_stage_lies_on_one_worker(schedule: str, workers: int) -> None:
    stages = stages_for(schedule, workers)
    held = [stages_of(schedule, workers, stages, worker) for worker in range(workers)]
    assert sorted(s for some in held for s in some) == list(range(stages))
    if stages > workers:
        v = "V" in schedule
        assert held == [(r, stages - 1 - r) if v else (r, r + workers) for r in range(workers)]


def test_a_model_on_the_meta_device_is_cut() -> None:
    with torch.device("meta"):
        model = gpt()
        stages = split(model, torch.zeros(2, 8, dtype=torch.long), 3)
    names = [name for stage in stages.modules for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def seconds(model: nn.Module, sample: Any) -> list[float]:
    found = cut_points(model, sample)
    inputs = by_name(inspect.signature(model.forward), sample)
    device = torch.device("cpu")
    return measure_segments(found, {k: torch.zeros_like(v, device=device) for k, v in inputs.items()}, device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("model", "found", "widest"),
    [
        (Positions, ("blocks.1", "blocks.2", "blocks.3", "head"), ("blocks.1", "blocks.2", "blocks.3", "head")),
        (Remembering, ("positions", "blocks.0", "head"), ("positions", *(f"blocks.{i}" for i in range(4)), "head")),
        (Residual, ("blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"), ("positions", "blocks.0", "blocks.1")),
    ],
)
def test_code_that_asks_for_sizes_is_cut(device: str, model: Any, found: Any, widest: Any) -> None:
    with torch.device(device):
        made = model()
    sample = torch.zeros(2, 8, dtype=torch.long)
    assert set(found) <= set(cut_points(made, sample).names)
    assert set(widest) <= set(cut_points(made, sample, (), 7).names)


@pytest.mark.parametrize("model", [Remembering, Residual])
def test_other_sizes_compute_the_same_or_are_refused(model: Any) -> None:
    torch.manual_seed(0)
    made = model().eval()
    stages = split(made, torch.zeros(2, 8, dtype=torch.long), 3)
    for shape in ((1, 5), (3, 16), (2, 8)):
        tokens = torch.randint(32, shape)
        expected, out = made(tokens), stages(tokens)
        torch.testing.assert_close(out["logits"], expected["logits"], atol=1e-5, rtol=1e-4)
    with pytest.raises(InvalidInput, match="branches on a size, which differs in this micro-batch"):
        stages(torch.zeros(2, 17, dtype=torch.long))


def test_finding_and_measuring_leave_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    before, stream = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    sample = torch.ones(3, 4)
    split(model, sample, 2)
    seconds(model, sample)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(stream, torch.get_rng_state())
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_a_model_without_numbers_is_measured_by_kinds_of_blocks() -> None:
    """By bytes the embedding would be half of the model; by time it is nothing. Equal blocks cost the same."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(20_000, 64), *(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 1024), nn.Linear(1024, 64)
        )
        sample = torch.zeros(2048, dtype=torch.long)
    assert split(model, sample, 2).cuts == ("1",)
    found = seconds(model, sample)
    assert len(found) == len(cut_points(model, sample).segments())
    assert len(set(found[1:5])) == 1
    assert min(found[5:]) > 2 * found[1]
    assert split(model, sample, 2, costs=found).cuts == ("6",)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))


@given(st.lists(st.integers(0, 50), min_size=4, max_size=9), st.booleans())
def test_two_stages_of_a_worker_are_balanced_together(costs: list[int], v: bool) -> None:
    holders = (0, 1, 1, 0) if v else (0, 1, 0, 1)

    def busiest(cuts: tuple[int, ...]) -> int:
        parts = [sum(costs[a:b]) for a, b in zip((0, *cuts), (*cuts, len(costs)))]
        return max(sum(part for part, holder in zip(parts, holders) if holder == worker) for worker in (0, 1))

    found = busiest(balance_workers(costs, [1] * len(costs), holders))
    best = min(busiest(cuts) for cuts in combinations(range(1, len(costs)), 3))
    assert best <= found <= 1.02 * busiest(balance(costs, 4))


def test_of_cuts_that_are_as_fast_the_lightest_is_taken() -> None:
    assert balance_workers([10, 0, 10], [1, 50, 100], (0, 1)) == (2,)
    assert balance_workers([10, 0, 10], [100, 50, 1], (0, 1)) == (1,)


def test_a_limit_of_bytes_moves_the_cut() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    costs = [9.0, 1.0, 1.0, 1.0]
    assert split(model, torch.ones(1, 8), 2, costs=costs).cuts == ("1",)
    assert split(model, torch.ones(1, 8), 2, costs=costs, limit=2 * 288).cuts == ("2",)


def normed_twice() -> nn.Module:
    norm = nn.BatchNorm1d(8)
    return nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8), norm)


@pytest.mark.parametrize(
    ("model", "sample", "stages", "cuts", "named"),
    [
        (normed_twice, torch.ones(2, 8), 2, ("2",), "several stages would update running statistics.*1.running_mean"),
        (Branching, torch.ones(2, 8), 2, None, "Branching.*depends on the values of a tensor.*nn.Sequential"),
        (Positions, torch.zeros(2, 8, dtype=torch.long), 9, None, "cut into 7"),
        (gpt, torch.zeros(2, 8, dtype=torch.long), 2, ("blocks.9",), "no module of that name.*blocks.0"),
        (gpt, torch.zeros(2, 8, dtype=torch.long), 3, ("blocks.2",), "2 stages, not 3"),
        (
            gpt,
            torch.zeros(2, 8, dtype=torch.long),
            3,
            ("blocks.2", "blocks.1"),
            "does not call blocks.1 after blocks.2",
        ),
    ],
    ids=["normed-twice", "branches", "too-many", "unknown", "count", "order"],
)
def test_what_cannot_be_cut_is_refused_with_the_cure(
    model: Any, sample: Any, stages: int, cuts: Any, named: str
) -> None:
    torch.manual_seed(0)
    with pytest.raises(InvalidInput, match=named):
        split(model(), sample, stages, cuts)
