"""Runs on real processes: the result does not depend on the number of workers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.support.processes import ChildFailed
from tests.support.training_runs import source, start, train
from unisono.checkpoint import checkpoints, open_newest
from unisono.run.spec import Result

TASKS = {
    "digits": (source("digits"), {"steps": 6}),
    "text": (
        source("text", text=(__file__,), model={"layers": 2, "width": 32, "heads": 2, "context": 16, "dropout": 0.1}),
        {"steps": 6},
    ),
    "regression": (source("regression", dropout=0.2, noise=0.1), {}),
}
EVERY = [(1, "auto", True), *((n, c, o) for n in (2, 3, 4) for c in ("shared_memory", "gloo") for o in (True, False))]


@pytest.mark.short(1)
@pytest.mark.parametrize("name", ["digits", "text"])
def test_exact_gives_the_same_bits_on_any_workers_wire_and_overlap(name, tmp_path) -> None:
    task, settings = TASKS[name]
    results = {
        (n, wire, overlap): train(n, task, tmp_path / f"{n}-{wire}-{overlap}", **settings, compress="Exact()",
                                  communicator=wire, overlap=overlap)
        for n, wire, overlap in EVERY
    }  # fmt: skip
    assert len({r["weights_sha256"] for r in results.values()}) == 1, results
    assert len({(r["loss"], *r["metrics"].items()) for r in results.values()}) == 1


@pytest.mark.short(1)
@pytest.mark.parametrize("name", TASKS)
def test_exact_resumes_bitwise_on_another_number_of_workers(name, tmp_path) -> None:
    task, settings = TASKS[name]
    steps = settings.get("steps", 8)
    whole = train(2, task, tmp_path / "whole", **settings, compress="Exact()")
    path = tmp_path / "parts"
    train(3, task, path, steps=2, compress="Exact()", schedule="Constant()")
    for workers, until in ((1, 3), (4, 5), (2, steps)):
        last = train(
            workers, task, path, steps=until, compress="Exact()", schedule="Constant()", run_dir=str(path), resume=True
        )
    if task.name == "digits":  # whose own schedule depends on the number of steps
        whole = train(2, task, tmp_path / "again", **settings, compress="Exact()", schedule="Constant()")
    if task.name == "text":
        whole = train(2, task, tmp_path / "again", **settings, compress="Exact()", schedule="Constant()")
    assert last["weights_sha256"] == whole["weights_sha256"]
    assert last["steps"] == steps


@pytest.mark.short(2)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_without_exact_losses_stay_within_1e5_of_one_worker(optimizer, workers, tmp_path) -> None:
    task = source("regression", optimizer=optimizer, dropout=0.1)
    losses = {}
    for n in (1, workers):
        train(n, task, tmp_path / str(n), steps=20)
        losses[n] = [e["loss"] for e in events(tmp_path / str(n), "step")]
    assert losses[workers][0] == pytest.approx(losses[1][0], abs=1e-6)
    assert losses[workers][-1] == pytest.approx(losses[1][-1], abs=1e-5)


@pytest.mark.short(1)
@pytest.mark.parametrize("wire", ["shared_memory", "gloo"])
def test_resume_continues_bitwise_without_exact_too(wire, tmp_path) -> None:
    """With the same number of workers, on a wire that adds in one order."""
    task = source("regression", dropout=0.2, noise=0.1)
    whole = train(2, task, tmp_path / "whole", communicator=wire)
    train(2, task, tmp_path / "parts", steps=3, communicator=wire)
    last = train(2, task, tmp_path / "parts", communicator=wire, run_dir=str(tmp_path / "parts"), resume=True)
    assert last["weights_sha256"] == whole["weights_sha256"]
    assert last["loss"] == whole["loss"]


def test_loading_in_processes_and_threads_changes_nothing(tmp_path) -> None:
    task = source("regression", noise=0.1)
    digests = {
        load: train(2, task, tmp_path / load[:4], compress="Exact()", load=load)["weights_sha256"]
        for load in ("Inline()", "Processes(count=2)")
    }
    quiet = source("regression")
    digests2 = {
        load: train(2, quiet, tmp_path / f"quiet{load[:4]}", compress="Exact()", load=load)["weights_sha256"]
        for load in ("Inline()", "Threads(ahead=3)", "Processes()")
    }
    assert len(set(digests.values())) == 1 == len(set(digests2.values()))
    assert set(digests.values()) != set(digests2.values())


def test_checkpoints_are_taken_kept_and_listed(tmp_path) -> None:
    train(2, source("regression"), tmp_path, checkpoint_every=2, keep_checkpoints=3)
    assert [step for step, _ in checkpoints(tmp_path / "checkpoints")] == [4, 6, 8]
    assert [e["step"] for e in events(tmp_path, "checkpoint")] == [2, 4, 6, 8]


def test_a_damaged_newest_checkpoint_is_named_and_the_previous_one_used(tmp_path) -> None:
    task = source("regression")
    whole = train(2, task, tmp_path, checkpoint_every=4)
    part = tmp_path / "checkpoints" / "step-00000008" / "part-0.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    again = train(2, task, tmp_path, run_dir=str(tmp_path), resume=True)
    assert again["weights_sha256"] == whole["weights_sha256"]
    assert "part-0.safetensors" in events(tmp_path, "checkpoint damaged")[0]["words"]
    assert events(tmp_path, "resume")[0]["step"] == 4


@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("sync", "compress", "layout"),
    [
        ("AllReduce()", "TopK(0.05)", "Layout()"),
        ("AllReduce()", "PowerSGD(rank=1)", "Layout()"),
        ("AllReduce()", "OneBit()", "Layout(shard=2)"),
        ("LocalSGD(2)", "OneBit()", "Layout()"),
        ("ParameterServer()", "TopK(0.05)", "Layout()"),
    ],
)
def test_what_messages_left_out_is_owed_after_a_resume_too(sync, compress, layout, tmp_path) -> None:
    """Walks meet where a checkpoint is taken, so one is taken in both."""
    workers = 4 if "2" in layout else 2
    options = {"sync": sync, "compress": compress, "layout": layout, "checkpoint_every": 4, "micro_batch": 6}
    task, parts = source("regression", norm=False), tmp_path / "parts"
    whole = train(workers, task, tmp_path / "whole", workers=workers, **options)
    train(workers, task, parts, steps=4, workers=workers, **options)
    owed = [name for name in open_newest(parts / "checkpoints", pytest.fail).specs if name.startswith("owed/")]
    assert {int(name.split("/")[1]) for name in owed} == set(range(workers))
    last = train(workers, task, parts, workers=workers, run_dir=str(parts), resume=True, **options)
    assert last["weights_sha256"] == whole["weights_sha256"]


def test_other_workers_owe_nothing_after_a_resume(tmp_path) -> None:
    options = {"compress": "OneBit()", "micro_batch": 6, "run_dir": str(tmp_path / "run")}
    for workers, steps, layout in ((2, 2, "Layout()"), (1, 4, "Layout()"), (4, 6, "Layout(shard=2)")):
        told = train(workers, source("regression"), tmp_path / "run", workers=workers, steps=steps, layout=layout,
                     resume=steps > 2, **options)  # fmt: skip
        assert told["steps"] == steps


def test_a_resume_from_another_model_names_the_first_tensor(tmp_path) -> None:
    train(2, source("regression"), tmp_path)
    with pytest.raises(ChildFailed, match=r"resume = .*another model: .*model/0.bias"):
        train(1, source("wider"), tmp_path, run_dir=str(tmp_path), resume=True)


@pytest.mark.parametrize(("field", "value"), [("seed", 1), ("global_batch", 48), ("compress", "Exact()")])
def test_a_resume_as_another_run_is_refused(tmp_path, field, value) -> None:
    train(1, source("regression"), tmp_path)
    with pytest.raises(ChildFailed, match=f"{field} = .*the run to resume was started with"):
        train(1, source("regression"), tmp_path, run_dir=str(tmp_path), resume=True, **{field: value})


def test_a_resume_with_another_optimizer_is_refused(tmp_path) -> None:
    train(1, source("regression", optimizer="sgd"), tmp_path)
    with pytest.raises(ChildFailed, match="optimizer = AdamW: the run to resume was started with SGD, whose state"):
        train(1, source("regression"), tmp_path, run_dir=str(tmp_path), resume=True)


def test_a_nan_names_step_micro_batch_and_worker_and_all_workers_know(tmp_path) -> None:
    with pytest.raises(ChildFailed, match=r"the loss is nan in step \d+, micro-batch \d, computed by worker \d"):
        train(2, source("regression", hidden_nan_at=11), tmp_path)


def test_evaluation_has_the_same_bits_on_any_number_of_workers(tmp_path) -> None:
    task = source("regression")
    metrics = [train(n, task, tmp_path / str(n), steps=1, compress="Exact()")["metrics"] for n in (1, 2, 3, 4)]
    assert all(m == metrics[0] for m in metrics)
    assert set(metrics[0]) == {"loss", "mae"}
    assert all(math.isfinite(v) and v > 0 for v in metrics[0].values())


def test_bf16_trains_and_differs_and_compile_computes_the_same(tmp_path) -> None:
    task = source("regression", norm=False)
    plain = train(2, task, tmp_path / "plain")
    half = train(2, task, tmp_path / "half", precision="bf16")
    assert half["loss"] == pytest.approx(plain["loss"], rel=0.1)
    assert half["weights_sha256"] != plain["weights_sha256"]


def test_synchronized_batchnorm_equals_one_worker_with_the_whole_batch(tmp_path) -> None:
    task = source("regression", optimizer="sgd")
    one = train(1, task, tmp_path / "one", steps=8, micro_batch=24)
    two = train(2, task, tmp_path / "two", steps=8, micro_batch=12, sync_batchnorm=True)
    other = train(2, task, tmp_path / "other", steps=8, micro_batch=12)
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert two["metrics"] == pytest.approx(one["metrics"], abs=1e-4)  # and so are the running ones
    assert abs(other["loss"] - one["loss"]) > 1e-4  # without it the statistics are those of half the batch


def test_every_worker_reports_and_the_result_is_complete(tmp_path) -> None:
    results = start(3, source("regression"), tmp_path, {"communicator": "gloo"})
    first = results[0]
    assert len({r["weights_sha256"] for r in results}) == 1
    assert first["samples"] == 8 * 24
    assert first["bytes_sent_per_worker"] > 8 * 4 * (8 * 32 + 32) * 4 / 3
    assert first["peak_rss_bytes"] > 50e6
    assert Result(**first).steps == 8


def events(path: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (path / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def test_samples_that_no_step_reaches_are_told_once(tmp_path) -> None:
    settings = {"workers": 1, "global_batch": 18, "micro_batch": 6}
    last = train(1, source("regression"), tmp_path, epochs=1, **settings)
    events = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    (words,) = [event["words"] for event in events if event["event"] == "samples left out"]
    assert (last["steps"], last["samples"]) == (5, 90)
    assert "the last 6 of 96 samples are not used" in words
    train(1, source("regression"), tmp_path / "steps", steps=2, **settings)
    assert "samples left out" not in (tmp_path / "steps" / "events.jsonl").read_text()
