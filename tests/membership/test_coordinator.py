"""Single decisions of the coordinator."""

import pytest

from unisono.membership import Coordinator, Heartbeat, Policy, StateVersion, ViewEnded, ViewStatus
from unisono.membership.protocol import StepCount
from unisono.membership.unreachable_pairs import UnreachablePairs


def running() -> Coordinator:
    """Two workers train in view 1, and a third may join after a step."""
    coordinator = Coordinator(Policy(expected_workers=2, max_workers=3))
    for count, active_view in ((1, 0), (2, 1)):
        for worker in "ab":
            coordinator.receive(Heartbeat(worker, count, active_view), 0.0)
    coordinator.receive(Heartbeat("c", 1, 0, 1), 0.1)
    assert coordinator.update.status is ViewStatus.ENDING_AT_BOUNDARY
    return coordinator


def test_a_failure_before_the_boundary_aborts_the_view() -> None:
    decisions = running().receive(Heartbeat("a", 3, 0, 1, StateVersion(1, 4), failed_view=1), 0.2)
    assert [each.status for each in decisions if isinstance(each, ViewEnded)] == [ViewStatus.ABORTED]


def test_an_end_at_the_boundary_does_not_abort_the_view() -> None:
    assert not running().receive(Heartbeat("a", 3, 0, 1, StateVersion(1, 5)), 0.2)


def test_a_view_whose_members_all_leave_stays_active() -> None:
    coordinator = Coordinator(Policy(expected_workers=2, max_workers=3))
    for count, active_view in ((1, 0), (2, 1)):
        for worker in "ab":
            coordinator.receive(Heartbeat(worker, count, active_view, leaving=True), 0.0)
    assert coordinator.update.status is ViewStatus.ACTIVE


def test_a_repeated_report_counts_twice_as_long() -> None:
    pairs = UnreachablePairs(5.0)
    pairs.report("a", ["b"], 0.0)
    pairs.report("a", ["b"], 1.0)  # the same one
    assert pairs.active_reports(4.9)
    assert not pairs.active_reports(5.1)
    pairs.report("a", ["b", "c"], 6.0)
    assert pairs.active_reports(15.9) == [("a", frozenset("bc"))]
    assert not pairs.active_reports(16.1)


def test_a_running_worker_is_not_lost_without_heartbeats() -> None:
    coordinator = Coordinator(Policy(expected_workers=2, max_workers=2))
    for count, active_view in ((1, 0), (2, 1)):
        for worker in "ab":
            coordinator.receive(Heartbeat(worker, count, active_view), 0.0)
    seconds = 0.0
    while seconds < 30.0:
        seconds += 0.3
        coordinator.receive(Heartbeat("a", 3 + round(10 * seconds), 1), seconds)
        coordinator.worker_running("b", seconds)
        coordinator.worker_running("unknown", seconds)
        assert not coordinator.tick(seconds)
    coordinator.receive(Heartbeat("a", 1000, 1), 30.9)
    assert [each.status for each in coordinator.tick(31.0) if isinstance(each, ViewEnded)] == [ViewStatus.ABORTED]


def test_repeated_steps_count_again_and_restored_ones_do_not() -> None:
    coordinator, counts = Coordinator(Policy(expected_workers=2, max_workers=2)), [StepCount()]

    def report(workers: str, count: int, step: int = 0, view: int = 0, *, works: bool = True) -> None:
        version = StateVersion(view, step) if view else StateVersion()
        active_view, ended = (view, 0) if works else (0, coordinator.view.number)
        for worker in workers:
            coordinator.receive(Heartbeat(worker, count, active_view, ended, version), 0.0)
            if coordinator.step_count != counts[-1]:
                counts.append(coordinator.step_count)

    report("ab", 1, works=False)
    report("ab", 2, 40, 1)  # from a checkpoint
    report("a", 3, 42, 1)
    coordinator.worker_exited("b", 0.0)
    report("c", 1, works=False)
    report("a", 4, 43, 1, works=False)  # reported only now
    assert coordinator.view.members == ("a", "c")
    report("ac", 5, 43, 2)
    report("a", 6, 44, 2)
    for worker in "ac":
        coordinator.worker_exited(worker, 0.0)
    report("de", 1, works=False)
    report("d", 2, 40, coordinator.view.number)
    report("d", 3, 41, coordinator.view.number)
    expected = [(0, 0), (0, 40), (2, 42), (3, 43), (4, 44), (4, 0), (4, 40), (5, 41)]
    assert counts == [StepCount(*each) for each in expected]


def at_work(first_step_seconds: float) -> Coordinator:
    """Two workers that have taken ten steps in a second, after a longer first step."""
    coordinator = Coordinator(Policy(expected_workers=2, max_workers=2))
    for count, active_view in ((1, 0), (2, 1)):
        for worker in "ab":
            coordinator.receive(Heartbeat(worker, count, active_view), 0.0)
    for tenth in range(round(10 * first_step_seconds) + 10):
        step = max(0, tenth + 1 - round(10 * first_step_seconds))
        for worker in "ab":
            coordinator.receive(Heartbeat(worker, 3 + tenth, 1, version=StateVersion(1, step)), 0.1 * tenth)
    return coordinator


@pytest.mark.parametrize("first_step_seconds", [0.1, 5.0])
def test_a_long_first_step_does_not_delay_the_detection_of_a_freeze(first_step_seconds: float) -> None:
    coordinator, frozen = at_work(first_step_seconds), first_step_seconds + 0.9
    for tenth in range(1, 10):
        coordinator.receive(Heartbeat("a", 1000 + tenth, 1, version=StateVersion(1, 10)), frozen + 0.1 * tenth)
        ended = [each.status for each in coordinator.tick(frozen + 0.1 * tenth) if isinstance(each, ViewEnded)]
        if ended:
            break
    assert ended == [ViewStatus.ABORTED]
    assert tenth >= 7  # Policy.min_heartbeat_timeout_seconds is 0.75


def test_a_worker_frozen_during_a_rendezvous_is_not_separated_from_the_others() -> None:
    coordinator = Coordinator(Policy(expected_workers=2, max_workers=2))
    for worker in "ab":
        coordinator.receive(Heartbeat(worker, 1), 0.0)
    coordinator.receive(Heartbeat("a", 2, 0, 1, failed_view=1), 1.0)  # "b" did not connect
    coordinator.tick(1.5)
    assert coordinator.view.members == ("a",)
    coordinator.receive(Heartbeat("a", 3, 2, 1), 1.6)
    decisions = coordinator.receive(Heartbeat("b", 2, 0, 2, unreachable=("a",), failed_view=1), 2.0)
    assert [(each.status, each.reason) for each in decisions if isinstance(each, ViewEnded)] == [
        (ViewStatus.ENDING_AT_BOUNDARY, "b may join")
    ]


def test_a_step_delayed_by_a_freeze_is_not_learned() -> None:
    coordinator, deadline = at_work(0.1), at_work(0.1).step_timeout.deadline_seconds
    for tenth in range(1, 10):  # "b" freezes for a moment
        coordinator.receive(Heartbeat("a", 1000 + tenth, 1, version=StateVersion(1, 10)), 1.0 + 0.1 * tenth)
    for worker in "ab":
        coordinator.receive(Heartbeat(worker, 2000, 1, version=StateVersion(1, 11)), 1.9)
    assert coordinator.view.number == 1
    assert coordinator.update.status is ViewStatus.ACTIVE
    assert coordinator.step_timeout.last == 1.9
    assert coordinator.step_timeout.deadline_seconds == deadline


def test_reports_of_running_processes_are_useful_once_a_member_is_late() -> None:
    coordinator = at_work(0.1)
    assert not coordinator.has_late_member(1.0 + 0.2)
    assert coordinator.has_late_member(1.0 + 0.4)
    for worker in "ab":
        coordinator.worker_running(worker, 1.4)
    assert not coordinator.has_late_member(1.5)
    for worker in "ab":
        coordinator.worker_exited(worker, 1.6)
    assert not coordinator.has_late_member(9.0)
