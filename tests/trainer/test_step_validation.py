"""All workers discard and name the same bad steps; replicas that differ are repaired."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import processes
from tests.support.checkpoints import load
from tests.support.training_runs import _worker, regression, source, train
from tests.support.virtual_runs import VirtualRun, run_virtual, run_virtual_alike
from unisono import Task
from unisono.checkpoint import checkpoints, fingerprint_of, open_newest
from unisono.data import MicroBatchPlan
from unisono.errors import Diverged, InvalidInput
from unisono.tasks.source import NamedTask
from unisono.trainer.loop import Trainer
from unisono.trainer.step_validation import StepValidator

PLAN = MicroBatchPlan(96, 24, 4, 0)  # of `regression`
STEPS = 8


def places(sample: int) -> list[tuple[int, int]]:
    """Steps and micro-batches that a sample comes in."""
    return [(t, m) for t in range(STEPS) for m in range(6) if sample in PLAN.indices(t, m)]


def told(life: VirtualRun, event: str = "bad step") -> list[Any]:
    return [each for each in life.events if each["event"] == event]


# What is not finite.


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"norm": False, "optimizer": "sgd"}])
def test_a_planted_sample_drops_the_same_steps_for_any_number_of_workers(options, tmp_path) -> None:
    task = regression(hidden_nan_at=11, **options)
    lives = [run_virtual_alike(n, task, tmp_path / str(n), bad_step="Skip()") for n in (1, 2, 3)]
    assert {life.skipped for life in lives} == {tuple(t for t, _ in places(11))}
    assert len({life.weights for life in lives}) == 1
    assert all(math.isfinite(life.loss) for life in lives)
    events = told(lives[2])
    for (t, m), event in zip(places(11), events, strict=True):
        assert (event["step"], event["micro_batches"], event["workers"]) == (t, [m], [str(m // 2)])
        assert event["samples"] == PLAN.indices(t, m).tolist()
        assert "of which 11 contains non-finite numbers" in event["words"]


@pytest.mark.parametrize(
    ("sync", "compress"),
    [("AllReduce()", "Cast()"), ("AllReduce()", "OneBit()"), ("ParameterServer()", "Exact()"),
     ("ParameterServer()", "OneBit()")],
)  # fmt: skip
def test_nothing_of_a_dropped_step_is_left_under_any_synchronizer_and_compressor(sync, compress, tmp_path) -> None:
    """Weights, buffers and the optimizer's state are the bits that they were before it."""
    bad, seen = places(11)[0][0], {}

    def look(rank: int, done: int, trainer: Trainer) -> None:
        trainer.replica.sync.wait_parameters()
        seen[rank, done] = {name: tensor.clone() for name, tensor in trainer.replica.state.items()}

    task = regression(hidden_nan_at=11)
    life = run_virtual_alike(2, task, tmp_path, look, bad_step="Skip()", sync=sync, compress=compress, steps=bad + 2)
    assert life.skipped == (bad,)
    for rank in (0, 1):
        before, after, then = (seen[rank, done] for done in (bad, bad + 1, bad + 2))
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert not any(torch.equal(then[name], tensor) for name, tensor in before.items() if "weight" in name)


def steep(at: int) -> Task:
    """A finite loss whose gradient is not: that of a root at 0."""
    task = regression(norm=False)
    x, y = task.data.x, task.data.y

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        here = (batch[0] == x[at]).all(1, keepdim=True)
        return ((output - batch[1]) ** 2).mean() + torch.where(here, (output * 0).abs(), 1.0).sqrt().mean() - 1

    assert len(x) == len(y)
    return replace(task, loss=loss)


@pytest.mark.parametrize("compress", ["Cast()", "Exact()"])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_gradient_that_is_not_finite_is_found_where_the_loss_is_finite(workers, clip, compress, tmp_path) -> None:
    life = run_virtual_alike(workers, steep(11), tmp_path, bad_step="Skip()", compress=compress, clip=clip)
    assert life.skipped == tuple(t for t, _ in places(11))
    assert math.isfinite(life.loss)
    found = [(event["step"], event["micro_batches"], event["workers"]) for event in told(life)]
    assert found == [(t, [m], [str(m * workers // 6)]) for t, m in places(11)]


def test_with_clip_a_gradient_that_is_not_finite_ends_a_run_that_stops(tmp_path) -> None:
    (found,) = run_virtual(1, steep(11), tmp_path, compress="Cast()", clip=1.0)
    assert isinstance(found, Diverged)
    assert f"the norm of the mean gradient is nan in step {places(11)[0][0]}" in str(found)


# What a run does about it.


def test_stopping_names_step_micro_batch_worker_and_sample(tmp_path) -> None:
    t, m = places(11)[0]
    for found in run_virtual(3, regression(hidden_nan_at=11), tmp_path):
        assert isinstance(found, Diverged)
        assert f"the loss is nan in step {t}, micro-batch {m}, computed by worker {m // 2} from samples" in str(found)
        assert "of which 11 contains non-finite numbers" in str(found)


def test_more_bad_steps_than_allowed_end_the_run(tmp_path) -> None:
    task = regression(hidden_nan_at=11)
    assert len(places(11)) == 2
    (found,) = run_virtual(1, task, tmp_path / "1", bad_step="Skip(limit=1)")
    assert isinstance(found, Diverged)
    assert "2 bad steps within 100 are more than Skip(limit=1) allows" in str(found)
    assert len(run_virtual_alike(1, task, tmp_path / "2", bad_step="Skip(limit=1, within=2)").skipped) == 2


def outlier(at: int) -> Task:
    """A sample whose loss is finite and far off."""
    task = regression(norm=False)
    task.data.y[at] = 1e3
    return replace(task, defaults={**task.defaults, "steps": 24})


def test_a_leap_of_the_loss_is_bad_if_it_is_to_be(tmp_path) -> None:
    at = next(i for i in range(96) if i in step(3))
    occurs = [t for t in range(24) if at in step(t)]
    life = run_virtual_alike(2, outlier(at), tmp_path / "2", bad_step="Skip(spike=20)")
    assert life.skipped == tuple(t for t in occurs if t >= 16)  # before, too few losses are known
    assert life.weights == run_virtual_alike(1, outlier(at), tmp_path / "1", bad_step="Skip(spike=20)").weights
    assert run_virtual_alike(1, outlier(at), tmp_path / "0", bad_step="Skip()").skipped == ()
    assert all(at in event["samples"] for event in told(life))


def step(t: int) -> list[int]:
    return [i for m in range(6) for i in PLAN.indices(t, m)]


@pytest.mark.parametrize("workers", [1, 2])
def test_skips_outlive_the_process(workers, tmp_path) -> None:
    options = {"bad_step": "Skip(spike=20)", "checkpoint_every": 1, "schedule": "Constant()"}
    task = outlier(40)
    whole = run_virtual_alike(2, task, tmp_path / "whole", **options)
    run_virtual_alike(2, task, tmp_path / "parts", **options, steps=20)
    last = run_virtual_alike(workers, task, tmp_path / "parts", resume=True, **options)
    assert whole.skipped
    assert (last.weights, last.skipped, last.loss) == (whole.weights, whole.skipped, whole.loss)


# Going back.


def test_going_back_comes_to_what_dropping_comes_to_where_only_a_sample_is_bad(tmp_path) -> None:
    task = regression(hidden_nan_at=11, dropout=0.1)
    dropped = run_virtual_alike(2, task, tmp_path / "dropped", bad_step="Skip()", checkpoint_every=2)
    for workers in (1, 3):
        back = run_virtual_alike(workers, task, tmp_path / str(workers), bad_step="RollBack()", checkpoint_every=2)
        assert (back.weights, back.skipped, back.loss) == (dropped.weights, dropped.skipped, dropped.loss)
        (t, _), (u, _) = places(11)
        words = [event["words"] for event in told(back)]
        assert words[0].endswith(
            "there is no checkpoint to roll back to" if t < 2 else f"checkpoint of step {t // 2 * 2}"
        )
        assert words[1].endswith(f"rolling back to the checkpoint of step {u // 2 * 2}")


def test_going_back_undoes_what_a_damaged_memory_has_done(tmp_path) -> None:
    def damages(rank: int, done: int, trainer: Trainer) -> None:
        if done == 5 and not hurt:
            hurt.append(done)
            with torch.no_grad():
                next(trainer.model.parameters())[0, 0] = math.nan

    hurt: list[int] = []
    task = regression()
    life = run_virtual_alike(1, task, tmp_path / "1", damages, bad_step="RollBack()", checkpoint_every=4)
    without = run_virtual_alike(1, task, tmp_path / "2", skips(5), checkpoint_every=4, bad_step="Skip()")
    assert life.skipped == without.skipped == (5,)
    assert life.weights == without.weights
    failed = run_virtual(1, task, tmp_path / "3", lambda *a: hurt.clear() or damages(*a), bad_step="Skip(limit=2)")
    assert isinstance(failed[0], Diverged)  # dropping alone does not cure it


def skips(step: int) -> Any:
    """Has a run leave out a step that is not bad."""

    def tamper(rank: int, done: int, trainer: Trainer) -> None:
        trainer.checkpointer.detector.skip([step])

    return tamper


def test_what_led_to_a_bad_step_is_left_out_too(tmp_path) -> None:
    task = regression(hidden_nan_at=11)
    last = places(11)[-1][0]
    life = run_virtual_alike(2, task, tmp_path, bad_step="RollBack(before=2)", checkpoint_every=1, keep_checkpoints=1)
    assert life.skipped[-1] == last
    assert len(life.skipped) == 2  # the newest checkpoint is that of the step before
    far = run_virtual_alike(2, task, tmp_path / "far", bad_step="RollBack(before=2)", checkpoint_every=3)
    assert set(far.skipped) >= set(range(max(last // 3 * 3, last - 2), last + 1))


# Replicas that differ.


def flips(who: int, at: int, where: str) -> Any:
    """Flips one bit of what worker `who` holds after `at` steps, once."""
    done_so = []

    def tamper(rank: int, done: int, trainer: Trainer) -> None:
        if (rank, done) == (who, at) and not done_so:
            done_so.append(done)
            name = next(n for n in trainer.replica.state if where in n)
            flat = trainer.replica.state[name].view(-1).view(torch.uint8)
            flat[1] ^= 4

    return tamper


@pytest.mark.parametrize(
    ("who", "where"), [(0, "layers.0.weight"), (2, "/layers.0.weight/exp_avg"), (0, "running_mean")]
)
def test_a_flipped_bit_is_found_named_and_undone(who, where, tmp_path) -> None:
    task = regression(dropout=0.1)
    whole = run_virtual_alike(3, task, tmp_path / "whole", checkpoint_every=2)
    healed = run_virtual_alike(
        3, task, tmp_path / "healed", flips(who, 4, where), checkpoint_every=2, compare_replicas_every=2
    )
    assert (healed.weights, healed.loss, healed.healed) == (whole.weights, whole.loss, 1)
    (event,) = told(healed, "replica healed")
    assert (event["step"], event["workers"]) == (4, [str(who)])
    if where != "running_mean":  # which every step puts back
        with pytest.raises(AssertionError):  # not all come to the same
            run_virtual_alike(3, task, tmp_path / "hurt", flips(who, 4, where))


def test_no_checkpoint_holds_a_damaged_state(tmp_path) -> None:
    """Taken right after the flip, or at the end."""
    for at in (4, 8):
        path = tmp_path / str(at)
        whole = run_virtual_alike(3, regression(), path / "whole", checkpoint_every=4)
        bad = flips(1, at, "layers.0.weight")
        healed = run_virtual_alike(3, regression(), path / "healed", bad, checkpoint_every=4, compare_replicas_every=5)
        assert (healed.weights, healed.healed) == (whole.weights, 1)
        kept = {step: load(found) for step, found in checkpoints(path / "healed" / "checkpoints")}
        assert fingerprint_of(open_newest(path / "healed" / "checkpoints", pytest.fail)) == whole.weights
        assert kept.keys() == ({5, 8} if at == 4 else {4, 8})


def test_what_went_into_gradients_stays_there_but_replicas_are_alike_again(tmp_path) -> None:
    life = run_virtual_alike(3, regression(), tmp_path, flips(1, 3, "layers.0.weight"), compare_replicas_every=4)
    assert life.healed == 1


def test_two_that_differ_have_no_majority(tmp_path) -> None:
    for found in run_virtual(2, regression(), tmp_path / "1", flips(1, 4, "layers.0.weight"), compare_replicas_every=2):
        assert isinstance(found, Diverged)
        assert "the replicas of worker 0, worker 1 differ before step 4, and no more than half of them" in str(found)
    whole = run_virtual_alike(2, regression(), tmp_path / "whole")
    options = {"compare_replicas_every": 2, "checkpoint_every": 3, "bad_step": "RollBack()"}
    back = run_virtual_alike(2, regression(), tmp_path / "2", flips(1, 4, "layers.0.weight"), **options)
    assert (back.weights, back.skipped, back.healed) == (whole.weights, (), 2)


def test_going_back_in_vain_has_an_end(tmp_path) -> None:
    def always(rank: int, done: int, trainer: Trainer) -> None:
        flips(1, 4, "layers.0.weight")(rank, done, trainer)

    options = {"compare_replicas_every": 4, "checkpoint_every": 3, "bad_step": "RollBack(limit=2)"}
    for found in run_virtual(2, regression(), tmp_path, always, **options):
        assert isinstance(found, Diverged)
        assert "no more than half of them are equal" in str(found)


def test_walks_whose_gradient_is_not_finite_end_by_themselves(tmp_path) -> None:
    found = run_virtual(2, steep(11), tmp_path, sync="LocalSGD(4)", compress="Cast()", clip=1.0)
    assert any(isinstance(each, Diverged) and "the norm of the mean gradient is nan" in str(each) for each in found)


# What cannot be.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync": "LocalSGD(2)", "bad_step": "Skip()"}, r"bad_step = Skip\(\): with LocalSGD.* take local steps"),
        (
            {"sync": "Gossip()", "compare_replicas_every": 2},
            r"compare_replicas_every = 2: with Gossip.* take local steps",
        ),
        (
            {"sync": "ParameterServer()", "compare_replicas_every": 2},
            r"compare_replicas_every = 2: .* do not keep the state",
        ),
        ({"sync": "ParameterServer()", "bad_step": "RollBack()"}, r"bad_step = RollBack\(\): only unsharded replicas"),
    ],
)
def test_what_cannot_be_is_refused(settings, message, tmp_path) -> None:
    (found, *_) = run_virtual(2, regression(), tmp_path, **settings)
    assert isinstance(found, InvalidInput)
    assert re.search(message, str(found))


# In processes.


def written(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (path / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def hurt(rank: int, size: int, task: NamedTask, path: Path, meeting: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A worker of a run in which worker 1 loses a bit after 4 steps."""
    plain, flip = StepValidator.between, flips(1, 4, "layers.0.weight")

    def between(validator: StepValidator, done: int) -> None:
        flip(rank, done, validator)
        plain(validator, done)

    StepValidator.between = between  # type: ignore[method-assign]
    return _worker(rank, size, task, {"threads": 1, **settings}, path, meeting)


def test_processes_heal_what_virtual_workers_heal(tmp_path) -> None:
    task = source("regression", dropout=0.1)
    whole = train(3, task, tmp_path / "whole", compress="Exact()")
    (tmp_path / "healed").mkdir()
    settings = {"compress": "Exact()", "compare_replicas_every": 2}
    results = processes.run(3, hurt, task, tmp_path / "healed", str(tmp_path), settings, timeout_seconds=120)
    assert [(r["weights_sha256"], r["healed"]) for r in results] == [(whole["weights_sha256"], 1)] * 3
    (event,) = written(tmp_path / "healed", "replica healed")
    assert event["workers"] == ["1"]


def test_processes_go_back_and_say_so(tmp_path) -> None:
    task = source("regression", hidden_nan_at=11)
    options = {"compress": "Exact()", "checkpoint_every": 2}
    dropped = train(1, task, tmp_path / "dropped", bad_step="Skip()", **options)
    back = train(2, task, tmp_path / "back", bad_step="RollBack()", **options)
    assert (back["weights_sha256"], back["skipped_steps"]) == (dropped["weights_sha256"], 2)
    assert [event["workers"] for event in written(tmp_path / "back", "bad step")] == [
        [str(m // 3)] for _, m in places(11)
    ]


@pytest.mark.parametrize("layout", ["Layout(shard=2)", "Layout(pipeline=2)"])
def test_a_step_of_a_replica_on_several_workers_is_dropped_whole(layout, tmp_path) -> None:
    task = source("regression", hidden_nan_at=11)
    alone = train(1, task, tmp_path / "alone", bad_step="Skip()", steps=4)
    laid = train(2, task, tmp_path / "laid", workers=2, layout=layout, bad_step="Skip()", steps=4)
    assert laid["skipped_steps"] == alone["skipped_steps"] > 0
    assert laid["loss"] == pytest.approx(alone["loss"], abs=1e-5)
