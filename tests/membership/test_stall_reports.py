"""Stall reports of the coordinator: when, how often, about which worker; all workers receive them."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.coordinator import TOKEN, running_coordinator
from unisono.membership import Agent, Coordinator, CoordinatorAddress, Heartbeat, Policy, StateVersion, ViewStatus
from unisono.membership.client import CoordinatorClient
from unisono.membership.http_client import HttpConnection
from unisono.membership.messages import HeartbeatReply, StatusMessage
from unisono.membership.server.stall_reports import COMMON_STALL_SECONDS, STALL_SECONDS, StallReports
from unisono.observe.activity import Activity, Phase

STEP = 0.5  # seconds
SUM = "sum (gradients, message 9)"


class VirtualRun:
    """A coordinator and two workers that send ten heartbeats a second, on a clock set by the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.coordinator = Coordinator(Policy(expected_workers=2, max_workers=2), started_at=self.now)
        self.reports = StallReports()
        self.counts = {"a": 0, "b": 0}
        self.step = 0
        self.phases = {"a": Phase.COMPUTE, "b": Phase.COMPUTE}
        self.since = dict.fromkeys(self.counts, self.now)
        self.silenced: set[str] = set()
        self.findings: list[tuple[float, str]] = []

    def enter(self, worker: str, phase: Phase) -> None:
        self.phases[worker], self.since[worker] = phase, self.now

    def advance(self, seconds: float) -> None:
        for _ in range(round(10 * seconds)):
            self.now += 0.1
            for worker in sorted(self.counts.keys() - self.silenced):
                self.counts[worker] += 1
                phase = self.phases[worker]
                waits_for = SUM if phase is Phase.COMMUNICATION else ""
                activity = Activity(
                    phase, self.step, 0, self.now - self.since[worker], waits_for, (), f"{worker}.py:7 work"
                )
                self.reports.receive(worker, activity, {phase.value: self.now}, self.now)
                view = self.coordinator.view.number
                self.coordinator.receive(
                    Heartbeat(worker, self.counts[worker], view, 0, StateVersion(view, self.step)), self.now
                )
            self.coordinator.tick(self.now)
            self.findings += [(self.now, words) for words in self.reports.check(self.coordinator, self.now)]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.advance(STEP)
            self.step += 1


@pytest.fixture
def run() -> VirtualRun:
    run = VirtualRun()
    run.advance(0.3)
    assert run.coordinator.view.number == 1
    run.train(20)
    run.advance(0.1)  # the last step is reported
    assert run.findings == []
    return run


@pytest.mark.parametrize("phase", [Phase.COMPUTE, Phase.DATA])
def test_the_worker_that_delays_a_step_is_named_within_two_seconds_of_the_deadline(run, phase) -> None:
    last = run.coordinator.step_timeout.last
    deadline = last + run.coordinator.step_timeout.deadline_seconds
    run.enter("a", Phase.COMMUNICATION)
    run.enter("b", phase)
    run.advance(deadline + 2 - run.now)
    ((at, words),) = run.findings
    assert deadline + STALL_SECONDS - 0.05 <= at <= deadline + 2
    assert "worker b has not arrived" in words
    assert "b.py:7 work" in words
    assert f"worker a waits for it in {SUM} at a.py:7 work" in words


def test_a_finding_is_repeated_each_time_the_stall_has_doubled(run) -> None:
    run.enter("a", Phase.COMMUNICATION)
    run.advance(100)
    ages = [at - run.coordinator.step_timeout.last for at, _ in run.findings]
    assert 4 <= len(ages) <= 7
    assert all(2 * one <= other + 1e-9 for one, other in pairwise(ages))
    run.findings.clear()
    run.enter("a", Phase.COMPUTE)
    run.train(3)
    assert run.findings == []


def test_a_stall_of_all_workers_is_reported_later_and_for_all(run) -> None:
    deadline = run.coordinator.step_timeout.last + run.coordinator.step_timeout.deadline_seconds
    run.advance(deadline + 2 - run.now)
    assert [at >= deadline + COMMON_STALL_SECONDS - 0.05 for at, _ in run.findings] == [True, True]
    assert "worker a" in run.findings[0][1]
    assert "worker b" in run.findings[1][1]


def test_an_evaluation_is_a_stall_only_if_it_takes_longer_than_any_before(run) -> None:
    for worker in "ab":
        run.enter(worker, Phase.EVALUATION)
    run.advance(4.0)
    for worker in "ab":
        run.enter(worker, Phase.COMPUTE)
    run.train(20)
    assert run.findings == []
    run.enter("a", Phase.COMMUNICATION)
    run.enter("b", Phase.EVALUATION)
    run.advance(7.5)
    assert run.findings == []
    run.advance(1.0)
    ((_, words),) = run.findings
    assert "worker b has not arrived, evaluating for 8 s" in words


def test_the_time_of_a_freeze_does_not_count_for_the_phase(run) -> None:
    coordinator, before = run.coordinator, run.coordinator.view
    run.enter("b", Phase.EVALUATION)
    run.advance(1.0)
    run.silenced.add("b")
    run.advance(10.0)
    assert coordinator.saved.status is ViewStatus.ABORTED
    coordinator.receive(Heartbeat("a", 10_000, 0, 1, StateVersion(1, run.step)), run.now)
    assert coordinator.view.members == ("a",)
    run.reports.view_formed(before, coordinator, run.now)
    run.silenced.clear()
    run.advance(1.0)
    run.enter("b", Phase.COMPUTE)
    run.advance(0.1)
    assert run.reports._longest.get(Phase.EVALUATION, 0.0) < 1.0


def test_the_first_step_may_take_longer_than_others() -> None:
    run = VirtualRun()
    run.advance(0.3)
    run.enter("a", Phase.COMMUNICATION)
    run.advance(8)
    assert run.findings == []
    run.advance(4)
    assert "worker b has not arrived, computing" in run.findings[0][1]


def test_a_frozen_worker_is_reported_once_with_its_last_activity(run) -> None:
    run.enter("a", Phase.COMMUNICATION)
    run.silenced.add("b")
    run.advance(3)
    ((_, words),) = run.findings
    assert "worker b is frozen or cut off" in words
    assert "last reported: computing at b.py:7 work" in words


def test_an_exited_process_is_reported_at_once(run) -> None:
    run.coordinator.worker_exited("b", run.now)
    (words,) = run.reports.check(run.coordinator, run.now)
    assert "the process of worker b has exited; last reported: computing at b.py:7 work" in words
    run.silenced.add("b")
    run.advance(1.0)
    assert run.findings == []


@pytest.mark.parametrize(("ends", "text"), [
    (1, "the process of worker b has exited; last reported: computing at b.py:7 work"),
    (9, "worker b is frozen or cut off, without a report for 1.1 s; last reported: computing"),
])  # fmt: skip
def test_a_lost_member_is_reported_even_if_the_next_view_forms_before_its_exit_is_known(ends, text, run) -> None:
    """The others see its connections close, and the next view forms at once."""
    coordinator, before = run.coordinator, run.coordinator.view
    coordinator.disconnected("b", run.now)
    coordinator.receive(Heartbeat("a", run.counts["a"] + 1, 0, 1, StateVersion(1, run.step)), run.now)
    run.counts["a"] += 1
    assert coordinator.view.members == ("a",)
    run.reports.view_formed(before, coordinator, run.now)
    run.silenced.add("b")
    run.train(ends)
    coordinator.worker_exited("b", run.now)
    run.train(4)
    ((_, words),) = run.findings
    assert text in words


def test_a_leaving_or_surplus_worker_is_not_reported_as_lost(run) -> None:
    coordinator, before = run.coordinator, run.coordinator.view
    coordinator.receive(Heartbeat("b", run.counts["b"] + 1, 0, 1, StateVersion(1, run.step), leaving=True), run.now)
    coordinator.receive(Heartbeat("a", run.counts["a"] + 1, 0, 1, StateVersion(1, run.step)), run.now)
    assert coordinator.view.members == ("a",)
    coordinator.disconnected("b", run.now)
    run.reports.view_formed(before, coordinator, run.now)
    coordinator.worker_exited("b", run.now)
    run.counts = {"a": run.counts["a"] + 1}
    run.train(4)
    assert run.findings == []


def test_a_new_worker_does_not_receive_old_findings(run) -> None:
    before = run.reports.latest
    run.enter("a", Phase.COMMUNICATION)
    run.advance(4)
    assert run.reports.after(0) == []
    assert run.reports.after(before) == [words for _, words in run.findings]
    assert run.reports.after(run.reports.latest) == []


def test_all_workers_receive_findings_and_the_status_has_the_time_spent(tmp_path: Path) -> None:
    """With a real server: worker b sleeps, worker a waits for it."""
    received: dict[str, list[str]] = {"a": [], "b": []}
    arrived = threading.Condition()
    activities = {
        "a": Activity(Phase.COMMUNICATION, 1, 0, 1.0, SUM),
        "b": Activity(Phase.DATA, 1, 0, 1.0, line="own.py:3 get"),
    }

    def attend(worker: str) -> CoordinatorClient:
        def report(words: str) -> None:
            with arrived:
                received[worker].append(words)
                arrived.notify_all()

        contact, agent = CoordinatorAddress(served.url, TOKEN), Agent(worker, StateVersion())
        return CoordinatorClient(contact, agent, lambda view: None, activity=lambda: activities[worker],
                          spent=lambda: {Phase.DATA: 2.5, Phase.COMPUTE: 0.0}, on_finding=report)  # fmt: skip

    policy = Policy(expected_workers=2, max_workers=2, heartbeat_seconds=0.5)
    with running_coordinator(tmp_path / "state", policy=policy) as served, attend("a") as a, attend("b") as b:
        for each in (a, b):
            assert each.next_view() is not None
            each.joined(1, 0, "")
            each.add_steps(1)
        with arrived:
            assert arrived.wait_for(lambda: all(received.values()), 60), received
        assert "worker b has not arrived, waiting for data for" in received["a"][0]
        assert "own.py:3 get" in received["b"][0]
        line = HttpConnection(CoordinatorAddress(served.url, TOKEN))
        answer = line.get("/v1/status", StatusMessage)
        line.close()
    assert answer is not None
    assert answer.body is not None
    assert received["a"][0] in answer.body.findings
    assert answer.body.spent == {"a": {Phase.DATA: 2.5}, "b": {Phase.DATA: 2.5}}
    activities = {each.worker: each.activity.phase for each in answer.body.workers if each.activity}
    assert activities == {"a": Phase.COMMUNICATION, "b": Phase.DATA}


@pytest.mark.parametrize("more", [
    {"activity": {"phase": "sleeping"}}, {"activity": {"phase": "data", "line": "x" * 301}}, {"spent": {"data": -1.0}},
    {"spent": {"elsewhere": 1.0}}, {"spent": {"data": 1e300}}, {"activity": {"phase": "data", "missing": [1] * 17}},
    {"activity": {}}, {"last_finding": -1}, {"activity": {"phase": "data", "line": "\x1b]0;title\x07"}},
    {"activity": {"phase": "data", "waits_for": "two\nlines"}}, {"address": {"host": "a\u202eb"}},
    {"version": {"digest": "\x9b2J"}}, {"worker": "a\n"},
])  # fmt: skip
def test_an_invalid_report_is_refused(more, tmp_path) -> None:
    with running_coordinator(tmp_path / "state") as served:
        line = HttpConnection(CoordinatorAddress(served.url, TOKEN))
        answer = line.request("POST", "/v1/beat", {"worker": "a", "count": 1, **more}, HeartbeatReply)
        line.close()
    assert answer is not None
    assert answer.status == 422
