"""Virtual workers learn what processes learn; durations follow from links and compute time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.support.training_runs import regression, source, train
from unisono import Task
from unisono.comm import Link, Simulated, simulate
from unisono.comm.link_model import sum_seconds
from unisono.errors import Diverged, InvalidInput, WorkerFailed
from unisono.plan import Cluster, Compute, Forecast, forecast
from unisono.plan.compute_benchmark import share_seconds
from unisono.plan.paced_runner import ClockPacer
from unisono.run.resolve import resolve_config

FAST = Link(1e12, 0.0)


def cluster(compute: str = "50ms", *links: Link) -> Cluster:
    return Cluster(links or (FAST,), Compute.of("--compute", compute))


def forecast_of(task: Task, on: Cluster, **settings: Any) -> Forecast:
    return forecast(task, resolve_config(task, settings), on)


# What is learned.


@pytest.mark.short(2)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compress": "Exact()"},
        {"compress": "Quantize(8)", "overlap": False},
        {"sync": "LocalSGD(every=3)"},
    ],
    ids=lambda settings: " ".join(f"{value}" for value in settings.values()) or "plain",
)
def test_it_learns_what_processes_learn(settings: dict[str, Any], tmp_path: Path) -> None:
    arguments = {"dropout": 0.2, "noise": 0.1}
    real = train(2, source("regression", **arguments), tmp_path, **settings)
    virtual = forecast_of(regression(**arguments), cluster(), workers=2, **settings)
    assert virtual.steps == real["steps"]
    assert virtual.metrics == pytest.approx(real["metrics"], abs=2e-6)
    if "sync" not in settings:
        assert virtual.loss == pytest.approx(real["loss"], abs=2e-6)
        lines = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
        losses = {line["step"]: line["loss"] for line in lines if line["event"] == "step"}
        assert len(losses) >= 2
        assert all(virtual.points[step - 1].loss == pytest.approx(loss, abs=2e-6) for step, loss in losses.items())
    if settings.get("compress") == "Exact()":
        assert virtual.weights_sha256 == real["weights_sha256"]


def test_the_clock_changes_nothing_that_is_learned_in_lockstep() -> None:
    slow, jittery = cluster("1s", Link(1e3, 0.1)), cluster("10ms±30%", Link(1e6, 1e-3), FAST, FAST)
    hashes = {forecast_of(regression(), on, workers=3).weights_sha256 for on in (cluster(), slow, jittery)}
    assert len(hashes) == 1


def test_the_same_forecast_has_the_same_numbers() -> None:
    def once(seed: int) -> Forecast:
        on = cluster("50ms±10%", Link(1e5, 1e-3))
        return forecast_of(regression(dropout=0.3), on, workers=3, seed=seed, sync="LocalSGD(every=2)")

    first = once(1)
    assert once(1) == first
    assert once(2).seconds != first.seconds


# How long it takes.


def test_a_step_of_nothing_but_computing_takes_what_computing_takes() -> None:
    it = forecast_of(regression(), cluster("50ms"), workers=3)
    assert it.step_seconds_median == pytest.approx(0.05, rel=1e-4)
    assert it.seconds == pytest.approx(8 * 0.05, rel=1e-4)
    assert it.waiting < 1e-3
    assert it.steps_per_second == pytest.approx(20, rel=1e-4)


def test_who_computes_more_of_a_step_takes_longer() -> None:
    it = forecast_of(regression(), cluster("40ms"), workers=4)  # 6 micro-batches: 2, 2, 1, 1
    assert it.step_seconds_median == pytest.approx(0.04 * 4 / 6 * 2, rel=1e-4)


def test_the_slowest_worker_sets_the_pace_and_the_others_wait() -> None:
    it = forecast_of(regression(), cluster("50ms,50ms,150ms"), workers=3)
    assert it.step_seconds_median == pytest.approx(0.15, rel=1e-4)
    assert it.waiting == pytest.approx(1 - (50 + 50 + 150) / 450, rel=1e-3)


def test_slower_links_make_longer_steps() -> None:
    seconds = [forecast_of(regression(), cluster("5ms", Link(rate, 1e-4)), workers=3).seconds
               for rate in (1e9, 1e7, 1e6, 1e5, 1e4)]  # fmt: skip
    assert seconds == sorted(seconds)
    assert seconds[-1] > 10 * seconds[0]
    delays = [forecast_of(regression(), cluster("5ms", Link(1e9, delay)), workers=3).seconds for delay in (0.0, 0.01)]
    assert delays[1] > 2 * delays[0]


def deep(layers: int = 8, width: int = 64) -> Task:
    x = torch.randn(32, width, generator=torch.Generator().manual_seed(0))
    return Task(
        model=lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))),
        data=TensorDataset(x, x),
        loss=lambda output, batch: (output - batch[1]).square().mean(),
        defaults={"steps": 3, "global_batch": 16, "micro_batch": 8},
    )


def test_what_travels_while_backward_runs_is_hidden() -> None:
    """Eight layers in buckets of one, each as long on the wire as in backward: all but the last is hidden."""
    one_layer = 64 * 64 * 4
    link = Link(one_layer / 0.01, 0.0)  # a ring of two sends each byte once: 10 ms a layer
    on = cluster("120ms", link)  # 40 ms forward, 10 ms a layer backward
    sync = f"AllReduce(bucket_bytes={one_layer}, first_bytes={one_layer})"
    took = {overlap: forecast_of(deep(), on, workers=2, sync=sync, overlap=overlap) for overlap in (True, False)}
    assert sum_seconds([link] * 2, one_layer) == pytest.approx(0.01)
    assert took[False].step_seconds_median == pytest.approx(0.12 + 0.08, rel=0.03)
    assert took[True].step_seconds_median == pytest.approx(0.12 + 0.01, rel=0.05)
    assert took[True].weights_sha256 == took[False].weights_sha256


@pytest.mark.parametrize("by_module", [True, False])
def test_the_time_of_forward_is_divided_among_the_modules(by_module: bool) -> None:
    def run(comm: Simulated) -> tuple[list[float], float, float]:
        model, begins = deep().model(), []
        pace = ClockPacer(comm, model, lambda step: 0.12, by_module)
        for layer in model:
            layer.register_forward_pre_hook(lambda *_: begins.append(comm.now()))
        pace.begin(0)
        out = model(torch.ones(4, 64))
        forward = comm.now()
        out.sum().backward()
        pace.end()
        with torch.no_grad():
            model(torch.ones(4, 64))  # an evaluation takes no time
        return begins[:8], forward, comm.now()

    ((begins, forward, end),) = simulate(1, run)
    assert begins == pytest.approx([0.005 * i for i in range(8)] if by_module else [0.04] * 8)
    assert (forward, end) == pytest.approx((0.04, 0.12))


def test_time_passes_also_for_parameters_that_a_loss_does_not_reach() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.used(x)
            return out

    it = forecast_of(dataclasses.replace(deep(), model=Half), cluster("60ms"), workers=2)
    assert it.step_seconds_median == pytest.approx(0.06, rel=1e-4)


def test_bytes_are_those_of_the_ring() -> None:
    it = forecast_of(deep(), cluster(), workers=2, evaluate_every=0)
    weights = 8 * 64 * 64 * 4
    assert weights < it.points[-1].bytes / it.steps < 1.05 * weights
    assert [point.step for point in it.points] == [1, 2, 3]
    assert it.points[-1].bytes <= it.bytes_per_worker < 1.05 * it.points[-1].bytes


def test_a_share_may_be_that_of_another_batch() -> None:
    on = dataclasses.replace(cluster("50ms"), share_samples=8.0)
    twice = forecast_of(regression(), on, workers=3, global_batch=48, micro_batch=4)
    assert twice.step_seconds_median == pytest.approx(0.1, rel=1e-4)


def test_what_is_measured_here_is_a_time() -> None:
    task = regression()
    assert 1e-5 < share_seconds(task, resolve_config(task, {"workers": 3})) < 10
    assert share_seconds(task, resolve_config(task, {"workers": 1})) > 0


# What goes wrong.


def test_what_cannot_work_is_said_as_in_training() -> None:
    with pytest.raises(InvalidInput, match="workers = 7: a step has only 6 micro-batches"):
        forecast_of(regression(), cluster(), workers=7)
    with pytest.raises(Diverged, match="the loss is nan in step"):
        forecast_of(regression(hidden_nan_at=3), cluster(), workers=2)


def test_an_error_of_the_users_own_names_the_worker_and_the_line() -> None:
    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        raise ValueError("spilled milk")

    with pytest.raises(WorkerFailed, match="worker 0 failed: ValueError: spilled milk") as failed:
        forecast_of(dataclasses.replace(regression(), loss=loss), cluster(), workers=2)
    assert 'raise ValueError("spilled milk")' in failed.value.traceback


def test_progress_is_told_by_one_worker() -> None:
    said: list[Any] = []
    task = regression()
    forecast(task, resolve_config(task, {"workers": 2}), cluster(), said.append)
    assert [message["step"] for message in said] == list(range(1, 9))
    assert said[-1]["samples_per_second"] == pytest.approx(24 / 0.05, rel=1e-3)
