"""Stall reports of the coordinator: when, how often, about which worker; all workers receive them."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.coordinator import TOKEN, serving
from unisono.membership import Agent, Coordinator, CoordinatorAddress, Heartbeat, Policy, StateVersion, ViewStatus
from unisono.membership.client import CoordinatorClient
from unisono.membership.http_client import HttpConnection
from unisono.membership.messages import HeartbeatReply, StatusMessage
from unisono.membership.server.stall_reports import COMMON_STALL_SECONDS, STALL_SECONDS, StallReports
from unisono.observe.activity import Activity, Phase

STEP = 0.5  # seconds that one takes
SUM = "sum (gradients, message 9)"


class Played:
    """A coordinator and two workers that beat ten times a second, on a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.coordinator = Coordinator(Policy(expected_workers=2, max_workers=2), started_at=self.now)
        self.reports = StallReports()
        self.counts = {"a": 0, "b": 0}
        self.step = 0
        self.phases = {"a": Phase.COMPUTE, "b": Phase.COMPUTE}
        self.since = dict.fromkeys(self.counts, self.now)
        self.mute: set[str] = set()
        self.said: list[tuple[float, str]] = []

    def be(self, worker: str, phase: Phase) -> None:
        self.phases[worker], self.since[worker] = phase, self.now

    def live(self, seconds: float) -> None:
        for _ in range(round(10 * seconds)):
            self.now += 0.1
            for worker in sorted(self.counts.keys() - self.mute):
                self.counts[worker] += 1
                phase = self.phases[worker]
                waits_for = SUM if phase is Phase.COMMUNICATION else ""
                doing = Activity(
                    phase, self.step, 0, self.now - self.since[worker], waits_for, (), f"{worker}.py:7 work"
                )
                self.reports.receive(worker, doing, {phase.value: self.now}, self.now)
                works_in = self.coordinator.view.number
                self.coordinator.receive(
                    Heartbeat(worker, self.counts[worker], works_in, 0, StateVersion(works_in, self.step)), self.now
                )
            self.coordinator.tick(self.now)
            self.said += [(self.now, words) for words in self.reports.check(self.coordinator, self.now)]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.live(STEP)
            self.step += 1


@pytest.fixture
def played() -> Played:
    play = Played()
    play.live(0.3)
    assert play.coordinator.view.number == 1
    play.train(20)
    play.live(0.1)  # the last one is heard of
    assert play.said == []
    return play


@pytest.mark.parametrize("phase", [Phase.COMPUTE, Phase.DATA])
def test_within_two_seconds_of_its_deadline_it_is_said_for_whom_a_step_waits(played, phase) -> None:
    last = played.coordinator.step_timeout.last
    deadline = last + played.coordinator.step_timeout.deadline_seconds
    played.be("a", Phase.COMMUNICATION)
    played.be("b", phase)
    played.live(deadline + 2 - played.now)
    ((at, words),) = played.said
    assert deadline + STALL_SECONDS - 0.05 <= at <= deadline + 2
    assert "worker b has not arrived" in words
    assert "b.py:7 work" in words
    assert f"worker a waits for it in {SUM} at a.py:7 work" in words


def test_what_goes_on_is_said_again_each_time_it_has_become_twice_as_long(played) -> None:
    played.be("a", Phase.COMMUNICATION)
    played.live(100)
    ages = [at - played.coordinator.step_timeout.last for at, _ in played.said]
    assert 4 <= len(ages) <= 7
    assert all(2 * one <= other + 1e-9 for one, other in pairwise(ages))
    played.said.clear()
    played.be("a", Phase.COMPUTE)
    played.train(3)
    assert played.said == []


def test_where_all_take_longer_alike_it_is_said_later_and_of_all(played) -> None:
    deadline = played.coordinator.step_timeout.last + played.coordinator.step_timeout.deadline_seconds
    played.live(deadline + 2 - played.now)
    assert [at >= deadline + COMMON_STALL_SECONDS - 0.05 for at, _ in played.said] == [True, True]
    assert "worker a" in played.said[0][1]
    assert "worker b" in played.said[1][1]


def test_an_evaluation_is_no_late_step_unless_it_takes_longer_than_it_ever_did(played) -> None:
    for worker in "ab":
        played.be(worker, Phase.EVALUATION)
    played.live(4.0)
    for worker in "ab":
        played.be(worker, Phase.COMPUTE)
    played.train(20)
    assert played.said == []
    played.be("a", Phase.COMMUNICATION)
    played.be("b", Phase.EVALUATION)
    played.live(7.5)
    assert played.said == []
    played.live(1.0)
    ((_, words),) = played.said
    assert "worker b has not arrived, evaluating for 8 s" in words


def test_how_long_a_worker_was_frozen_says_nothing_about_what_it_did(played) -> None:
    coordinator, before = played.coordinator, played.coordinator.view
    played.be("b", Phase.EVALUATION)
    played.live(1.0)
    played.mute.add("b")
    played.live(10.0)
    assert coordinator.saved.status is ViewStatus.ABORTED
    coordinator.receive(Heartbeat("a", 10_000, 0, 1, StateVersion(1, played.step)), played.now)
    assert coordinator.view.members == ("a",)
    played.reports.view_formed(before, coordinator, played.now)
    played.mute.clear()
    played.live(1.0)
    played.be("b", Phase.COMPUTE)
    played.live(0.1)
    assert played.reports._longest.get(Phase.EVALUATION, 0.0) < 1.0


def test_what_is_done_once_in_the_first_step_may_take_longer() -> None:
    play = Played()
    play.live(0.3)
    play.be("a", Phase.COMMUNICATION)
    play.live(8)
    assert play.said == []
    play.live(4)
    assert "worker b has not arrived, computing" in play.said[0][1]


def test_a_frozen_worker_and_a_dead_one_are_said_once_with_what_they_did_last(played) -> None:
    played.be("a", Phase.COMMUNICATION)
    played.mute.add("b")
    played.live(3)
    ((_, words),) = played.said
    assert "worker b is frozen or cut off" in words
    assert "last reported: computing at b.py:7 work" in words


def test_a_process_that_has_ended_is_said_at_once(played) -> None:
    played.coordinator.worker_exited("b", played.now)
    (words,) = played.reports.check(played.coordinator, played.now)
    assert "the process of worker b has exited; last reported: computing at b.py:7 work" in words
    played.mute.add("b")
    played.live(1.0)
    assert played.said == []


@pytest.mark.parametrize(("ends", "said"), [
    (1, "the process of worker b has exited; last reported: computing at b.py:7 work"),
    (9, "worker b is frozen or cut off, without a report for 1.1 s; last reported: computing"),
])  # fmt: skip
def test_who_is_left_behind_before_anybody_said_how_it_ended_is_named_all_the_same(ends, said, played) -> None:
    """The others see its connections close, and the next view is there at once."""
    coordinator, before = played.coordinator, played.coordinator.view
    coordinator.disconnected("b", played.now)
    coordinator.receive(Heartbeat("a", played.counts["a"] + 1, 0, 1, StateVersion(1, played.step)), played.now)
    played.counts["a"] += 1
    assert coordinator.view.members == ("a",)
    played.reports.view_formed(before, coordinator, played.now)
    played.mute.add("b")
    played.train(ends)
    coordinator.worker_exited("b", played.now)
    played.train(4)
    ((_, words),) = played.said
    assert said in words


def test_who_leaves_or_is_one_too_many_is_not_called_lost(played) -> None:
    coordinator, before = played.coordinator, played.coordinator.view
    coordinator.receive(
        Heartbeat("b", played.counts["b"] + 1, 0, 1, StateVersion(1, played.step), leaving=True), played.now
    )
    coordinator.receive(Heartbeat("a", played.counts["a"] + 1, 0, 1, StateVersion(1, played.step)), played.now)
    assert coordinator.view.members == ("a",)
    coordinator.disconnected("b", played.now)
    played.reports.view_formed(before, coordinator, played.now)
    coordinator.worker_exited("b", played.now)
    played.counts = {"a": played.counts["a"] + 1}
    played.train(4)
    assert played.said == []


def test_who_comes_anew_is_not_told_old_news(played) -> None:
    before = played.reports.latest
    played.be("a", Phase.COMMUNICATION)
    played.live(4)
    assert played.reports.after(0) == []
    assert played.reports.after(before) == [words for _, words in played.said]
    assert played.reports.after(played.reports.latest) == []


def test_every_worker_hears_it_and_whoever_asks_sees_where_the_time_went(tmp_path: Path) -> None:
    """At a real server: 'b' sleeps, 'a' waits for it."""
    heard: dict[str, list[str]] = {"a": [], "b": []}
    told = threading.Condition()
    doings = {
        "a": Activity(Phase.COMMUNICATION, 1, 0, 1.0, SUM),
        "b": Activity(Phase.DATA, 1, 0, 1.0, line="own.py:3 get"),
    }

    def attend(worker: str) -> CoordinatorClient:
        def tell(words: str) -> None:
            with told:
                heard[worker].append(words)
                told.notify_all()

        contact, agent = CoordinatorAddress(served.url, TOKEN), Agent(worker, StateVersion())
        return CoordinatorClient(contact, agent, lambda view: None, activity=lambda: doings[worker],
                          spent=lambda: {Phase.DATA: 2.5, Phase.COMPUTE: 0.0}, on_finding=tell)  # fmt: skip

    policy = Policy(expected_workers=2, max_workers=2, heartbeat_seconds=0.5)
    with serving(tmp_path / "state", policy=policy) as served, attend("a") as a, attend("b") as b:
        for each in (a, b):
            assert each.next_view() is not None
            each.joined(1, 0, "")
            each.add_steps(1)
        with told:
            assert told.wait_for(lambda: all(heard.values()), 60), heard
        assert "worker b has not arrived, waiting for data for" in heard["a"][0]
        assert "own.py:3 get" in heard["b"][0]
        line = HttpConnection(CoordinatorAddress(served.url, TOKEN))
        answer = line.get("/v1/status", StatusMessage)
        line.close()
    assert answer is not None
    assert answer.body is not None
    assert heard["a"][0] in answer.body.findings
    assert answer.body.spent == {"a": {Phase.DATA: 2.5}, "b": {Phase.DATA: 2.5}}
    doings = {each.worker: each.activity.phase for each in answer.body.workers if each.activity}
    assert doings == {"a": Phase.COMMUNICATION, "b": Phase.DATA}


@pytest.mark.parametrize("more", [
    {"activity": {"phase": "sleeping"}}, {"activity": {"phase": "data", "line": "x" * 301}}, {"spent": {"data": -1.0}},
    {"spent": {"elsewhere": 1.0}}, {"spent": {"data": 1e300}}, {"activity": {"phase": "data", "missing": [1] * 17}},
    {"activity": {}}, {"last_finding": -1}, {"activity": {"phase": "data", "line": "\x1b]0;title\x07"}},
    {"activity": {"phase": "data", "waits_for": "two\nlines"}}, {"address": {"host": "a\u202eb"}},
    {"version": {"digest": "\x9b2J"}}, {"worker": "a\n"},
])  # fmt: skip
def test_what_is_no_report_is_refused(more, tmp_path) -> None:
    with serving(tmp_path / "state") as served:
        line = HttpConnection(CoordinatorAddress(served.url, TOKEN))
        answer = line.request("POST", "/v1/beat", {"worker": "a", "count": 1, **more}, HeartbeatReply)
        line.close()
    assert answer is not None
    assert answer.status == 422
