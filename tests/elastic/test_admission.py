"""A worker that would train something else is refused before it takes part."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.coordinator import TOKEN, running_coordinator
from unisono.comm import outcomes, simulate
from unisono.elastic.admission import admit, compare
from unisono.errors import TaskMismatch
from unisono.launch import StopRequest, WorkerContext, WorkerIdentity
from unisono.membership import CoordinatorAddress
from unisono.membership.http_client import HttpConnection
from unisono.membership.messages import TraitsMessage

TRAITS = {"samples": "96", "optimizer.lr": "0.1"}
OTHER = {**TRAITS, "optimizer.lr": "0.2"}


def worker(name: str) -> WorkerContext:
    return WorkerContext(WorkerIdentity(0, 1, 0, 1, "", "x"), lambda message: None, StopRequest(), name)


def never() -> bool:
    return False


def test_workers_that_meet_find_out_which_of_them_differs() -> None:
    def run(comm: Any, odd: int) -> None:
        compare(comm, lambda: OTHER if comm.rank == odd else TRAITS)

    assert simulate(3, run, -1) == [None] * 3
    for odd, words in (
        (1, "0.2: that is worker 1's, and worker 0 has 0.1"),
        (0, "0.1: that is worker 1's, and worker 0"),
    ):
        for outcome in outcomes(3, run, odd):
            assert isinstance(outcome, TaskMismatch)
            assert f"optimizer.lr = {words}" in str(outcome)


def test_the_first_of_the_runs_own_workers_says_what_the_others_must_have(tmp_path: Path) -> None:
    with running_coordinator(tmp_path / "state") as served:
        contact = CoordinatorAddress(served.url, TOKEN)
        admit(contact, worker("1"), TRAITS, never)
        admit(contact, worker("0"), TRAITS, never)
        admit(contact, worker("0.2"), TRAITS, never)
        admit(contact, worker("there-1a2b:0"), TRAITS, never)
        for name in ("1.2", "there-1a2b:1"):
            with pytest.raises(TaskMismatch, match=r"optimizer.lr = 0.2: that is this worker's, and the run has 0.1"):
                admit(contact, worker(name), OTHER, never)
        admit(contact, worker("2"), TRAITS, never)


def test_who_comes_from_elsewhere_says_nothing_and_waits_for_what_the_run_says(tmp_path: Path) -> None:
    with running_coordinator(tmp_path / "state") as served:
        contact, came = CoordinatorAddress(served.url, TOKEN), list[BaseException]()

        def join() -> None:
            try:
                admit(contact, worker("there-1a2b:0"), OTHER, never)
            except TaskMismatch as error:
                came.append(error)

        joining = threading.Thread(target=join)
        joining.start()
        admit(contact, worker("0"), TRAITS, never)
        joining.join(30)
        assert len(came) == 1


def test_a_restarted_coordinator_knows_it_too(tmp_path: Path) -> None:
    with running_coordinator(tmp_path / "state") as served:
        admit(CoordinatorAddress(served.url, TOKEN), worker("0"), TRAITS, never)
    with running_coordinator(tmp_path / "state") as served, pytest.raises(TaskMismatch):
        admit(CoordinatorAddress(served.url, TOKEN), worker("1"), OTHER, never)


def test_who_is_to_stop_waits_for_nobody(tmp_path: Path) -> None:
    with running_coordinator(tmp_path / "state") as served:
        admit(CoordinatorAddress(served.url, TOKEN), worker("there-1a2b:0"), TRAITS, lambda: True)


def test_a_coordinator_that_is_away_keeps_nobody_for_ever(monkeypatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        "unisono.elastic.admission.time",
        SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda s: setattr(clock, "now", clock.now + s)),
    )
    admit(CoordinatorAddress("http://127.0.0.1:1", TOKEN), worker("0"), TRAITS, never)
    assert 25 < clock.now < 60


@pytest.mark.parametrize(
    "wrong",
    [{}, [], {"traits": []}, {"traits": {"a": 5}}, {"traits": {"a": "x" * 5000}}, {"traits": {"x" * 300: "a"}},
     {"traits": {str(i): "" for i in range(257)}}, {"traits": {}, "more": 1}],
)  # fmt: skip
def test_what_no_traits_are_is_refused(wrong: Any, tmp_path: Path) -> None:
    with running_coordinator(tmp_path / "state") as served:
        line = HttpConnection(CoordinatorAddress(served.url, TOKEN))
        answer = line.request("PUT", "/v1/traits", wrong, TraitsMessage)
        assert answer is not None
        assert answer.status == 422
        nothing = line.get("/v1/traits", TraitsMessage)
        assert nothing is not None
        assert nothing.status == 404
        line.close()


def test_traits_that_a_coordinator_refuses_are_not_compared(tmp_path: Path) -> None:
    with running_coordinator(tmp_path / "state") as served:
        admit(CoordinatorAddress(served.url, TOKEN), worker("0"), {"x" * 300: "a"}, never)
