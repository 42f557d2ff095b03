"""Workers of unequal speed: steps are faster, weights are the same, and stragglers are named."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training_runs import HERE, Noisy, regression, train
from unisono import Task
from unisono.comm import Link
from unisono.data import MicroBatchAllocation, assign
from unisono.data.work_shares import HISTORY_STEPS, fastest_counts, last_done
from unisono.errors import InvalidInput
from unisono.plan import Cluster, Compute, Forecast, forecast
from unisono.run.resolve import resolve_config
from unisono.tasks.source import NamedTask
from unisono.trainer.load_balance import LoadBalancer, RebalanceMode, WorkerClock

MICRO_BATCHES = 12
SETTINGS = {"micro_batch": 2, "global_batch": 2 * MICRO_BATCHES, "steps": 40}
EXACT = {**SETTINGS, "compress": "Exact()"}


class Record:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, event: str, /, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def step(self, step: int, steps: int, fields: Callable[[], Mapping[str, Any]]) -> None:
        pass

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


def balance(workers: int, follow: RebalanceMode, rank: int = 0, **more: Any) -> tuple[LoadBalancer, Record]:
    record = Record()
    shares = MicroBatchAllocation(assign(MICRO_BATCHES, [1.0] * workers), rank, range(workers), 0)
    clock = more.pop("clock", WorkerClock(lambda: 0.0, waited=lambda: 0.0, fetching=lambda: 0.0))
    return LoadBalancer(shares, follow, rank, record, clock, **more), record


def hear(each: LoadBalancer, seconds: Sequence[float], stocks: int) -> None:
    """Enough for as many stocks."""
    for done in range(2, stocks * (HISTORY_STEPS + 2) + 2):
        each.update(each.shares.settled_from + done, seconds)


# What is measured.


@pytest.mark.parametrize(("fetching", "pace"), [(0.0, 1.0), (4.0, 1.0), (12.0, 3.0)])
def test_a_pace_has_no_waiting_in_it_but_the_fetching_that_others_slowness_hides(fetching, pace) -> None:
    clock, waited, fetched = iter([10.0, 16.0]), iter([1.0, 3.0]), iter([5.0, 5.0 + fetching])
    each, _ = balance(
        2, RebalanceMode.YES, clock=WorkerClock(clock.__next__, waited=waited.__next__, fetching=fetched.__next__)
    )
    assert each.pace == 0
    with each.measured(4):
        pass
    assert each.pace == pace


# Who is named.


def test_a_worker_that_lags_far_is_named_once_and_stays() -> None:
    each, record = balance(3, RebalanceMode.YES)
    hear(each, [0.1, 0.5, 0.1], stocks=6)
    (named,) = record.of("slow worker")
    assert (named["worker"], named["times"], named["removed"]) == ("1", pytest.approx(5.0), False)
    assert "worker 1 takes 5.0 times as long for a micro-batch as the others" in named["words"]
    assert (
        f"it gets {fastest_counts(MICRO_BATCHES, [0.1, 0.5, 0.1])[1]} of {MICRO_BATCHES} micro-batches"
        in named["words"]
    )
    assert "remove_slower_than" in named["words"]
    assert not each.asked_to_leave


@pytest.mark.parametrize("paces", [[0.1, 0.25], [0.1, 0.1, 0.29], [0.1, 0.1, 0.1]])
def test_others_are_not_named(paces) -> None:
    each, record = balance(len(paces), RebalanceMode.YES)
    hear(each, paces, stocks=6)
    assert not record.of("slow worker")


def test_who_was_slow_for_a_while_is_not_named() -> None:
    each, record = balance(2, RebalanceMode.NO)
    hear(each, [0.1, 0.9], stocks=1)
    hear(each, [0.1, 0.1], stocks=2)
    assert not record.of("slow worker")


@pytest.mark.parametrize(("limit", "leaves"), [(None, set()), (6.0, set()), (4.0, {1}), (2.0, {1})])
@pytest.mark.parametrize("rank", [0, 1])
def test_it_leaves_only_if_the_user_allows_it(limit, leaves, rank) -> None:
    each, record = balance(3, RebalanceMode.NO, rank=rank, remove_slower_than=limit)
    hear(each, [0.1, 0.5, 0.1], stocks=6)
    assert each.asked_to_leave == leaves
    assert each.leave_requested == (rank in leaves)
    (named,) = record.of("slow worker")
    assert named["removed"] == bool(leaves)
    assert not leaves or f"remove_slower_than = {limit:g}" in named["words"]


def test_where_shares_could_follow_it_is_said_once() -> None:
    each, record = balance(2, RebalanceMode.IF_ASKED)
    hear(each, [0.1, 0.25], stocks=4)
    (hint,) = record.of("unequal workers")
    assert "0.1, 0.25 s for a micro-batch" in hint["words"]
    seconds = [0.1, 0.25]
    part = last_done(fastest_counts(MICRO_BATCHES, seconds), seconds) / last_done([6, 6], seconds)
    assert f"balance = on, steps would take {part:.0%}" in hint["words"]
    assert each.shares.counts == [6, 6]


@pytest.mark.parametrize(
    ("follow", "paces"),
    [(RebalanceMode.IF_ASKED, [0.1, 0.12]), (RebalanceMode.NO, [0.1, 0.25]), (RebalanceMode.YES, [0.1, 0.25])],
)
def test_else_it_is_not_said(follow, paces) -> None:
    each, record = balance(2, follow)
    hear(each, paces, stocks=4)
    assert not record.of("unequal workers")


# Whole runs on a made-up clock.


def run_of(compute: str, **settings: Any) -> Forecast:
    task = regression(dropout=0.2, noise=0.1)
    on = Cluster((Link(1e12, 0.0),), Compute.of("--compute", compute))
    return forecast(task, resolve_config(task, settings), on)


@pytest.mark.short(1)
@pytest.mark.parametrize("sync", ["AllReduce()", "ParameterServer()"])
def test_in_exact_mode_shares_follow_speeds_and_change_no_bit(sync) -> None:
    alone = run_of("1s", workers=1, **EXACT)
    fixed = run_of("100ms,250ms", workers=2, sync=sync, balance="off", **EXACT)
    moving = run_of("100ms,250ms", workers=2, sync=sync, **EXACT)
    assert alone.weights_sha256 == fixed.weights_sha256 == moving.weights_sha256
    assert alone.metrics == moving.metrics
    seconds = [0.1 / 6, 0.25 / 6]
    ends = [point.seconds for point in moving.points]
    lasting = (ends[-1] - ends[-11]) / 10
    assert lasting == pytest.approx(last_done(fastest_counts(MICRO_BATCHES, seconds), seconds), rel=1e-3)
    assert fixed.step_seconds_median == pytest.approx(0.25, rel=1e-3)


def test_waiting_for_weights_is_no_slowness_of_the_worker(monkeypatch) -> None:
    """Where each forward pass waits for the weights that it begins with."""
    heard: list[Sequence[float]] = []
    monkeypatch.setattr(LoadBalancer, "update", lambda self, done, paces: heard.append(paces))
    on = Cluster((Link(3e4, 0.0),), Compute.of("--compute", "100ms,150ms"))
    told = forecast(
        regression(), resolve_config(regression(), {"workers": 2, "sync": "ParameterServer()", **EXACT, "steps": 6}), on
    )
    assert told.step_seconds_median > 0.3
    assert all(pace == 0 for pace in heard[0])
    for paces in heard[2:]:
        assert paces == pytest.approx([0.1 / 6, 0.15 / 6], rel=1e-6)


def test_without_exact_shares_follow_only_if_asked() -> None:
    fixed, auto, moving = (run_of("100ms,250ms", workers=2, balance=b, **SETTINGS) for b in ("off", "auto", "on"))
    assert auto == fixed
    assert moving.seconds < 0.75 * fixed.seconds
    assert moving.loss == pytest.approx(fixed.loss, abs=1e-5)


def test_four_workers_with_one_slow() -> None:
    fixed, moving = (run_of("100ms,100ms,100ms,300ms", workers=4, balance=b, **EXACT) for b in ("off", "auto"))
    assert fixed.weights_sha256 == moving.weights_sha256
    assert moving.step_seconds_median < 0.5 * fixed.step_seconds_median


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sync": "LocalSGD(2)"}, "each worker takes local steps"),
        ({"sync": "AllReduce(reduce='adasum')"}, "count as one"),
        ({"sync_batchnorm": True}, "equally many micro-batches in parallel"),
    ],
)
def test_where_shares_cannot_follow_asking_for_it_is_refused(settings, words) -> None:
    with pytest.raises(InvalidInput, match=f"balance = on: .*{words}"):
        run_of("100ms", workers=2, balance="on", **SETTINGS, **settings)


def test_under_a_layout_it_is_refused_too() -> None:
    with pytest.raises(InvalidInput, match=r"balance = on: with Layout\(shard=2\), workers compute a micro-batch"):
        resolve_config(regression(), {"workers": 2, "layout": "Layout(shard=2)", "balance": "on"})


# Whole runs in processes, one of which has a slow disk.


class SlowDisk(Noisy):
    """Takes `seconds` for a sample in the process that is the first to make it, and in those that it forks."""

    def __init__(self, seconds: float, mark: str) -> None:
        super().__init__(96, 0.0)
        self._seconds, self._slow = seconds, False
        if seconds:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
                self._slow = True

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._slow:
            time.sleep(self._seconds)
        return super().__getitem__(i)


def slow_disk(*, seconds: float, mark: str) -> Task:
    """`regression` on such a disk."""
    task = regression(dropout=0.2)
    return Task(model=task.model, data=SlowDisk(seconds, mark), loss=task.loss, optimizer=task.optimizer,
                defaults=task.defaults, name="slow disk")  # fmt: skip


def test_a_slow_worker_computes_less_and_the_weights_are_the_same(tmp_path: Path) -> None:
    def run(workers: int, name: str, seconds: float, **more: Any) -> str:
        path = tmp_path / name
        task = NamedTask(
            "tests.end_to_end.test_load_balance:slow_disk", {"seconds": seconds, "mark": f"{path}.mark"}, HERE
        )
        told: str = train(workers, task, path, **{**EXACT, "steps": 30}, **more)["weights_sha256"]
        return told

    alone = run(1, "alone", 0.0)
    assert run(2, "fixed", 0.0, balance="off") == alone
    assert run(2, "moving", 25e-3) == alone
    lines = [json.loads(line) for line in (tmp_path / "moving" / "events.jsonl").read_text().splitlines()]
    shares = [line["micro_batches"] for line in lines if line["event"] == "shares"]
    assert shares
    assert all(sum(each) == MICRO_BATCHES and min(each) <= 3 for each in shares)
    named = [line for line in lines if line["event"] == "slow worker"]
    assert len(named) == 1
    assert shares[-1][int(named[0]["worker"])] == min(shares[-1])
