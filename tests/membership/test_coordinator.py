"""Single decisions of the coordinator."""

import pytest

from unisono.membership import Coordinator, Heartbeat, Policy, StateVersion, ViewEnded, ViewStatus
from unisono.membership.protocol import StepCount
from unisono.membership.unreachable_pairs import UnreachablePairs


def begun() -> Coordinator:
    """Two are at work in view 1, and a third may join after a step."""
    found = Coordinator(Policy(expected_workers=2, max_workers=3))
    for count, works_in in ((1, 0), (2, 1)):
        for worker in "ab":
            found.receive(Heartbeat(worker, count, works_in), 0.0)
    found.receive(Heartbeat("c", 1, 0, 1), 0.1)
    assert found.update.status is ViewStatus.ENDING_AT_BOUNDARY
    return found


def test_who_breaks_before_the_boundary_ends_the_view_for_all_at_once() -> None:
    happened = begun().receive(Heartbeat("a", 3, 0, 1, StateVersion(1, 4), failed_view=1), 0.2)
    assert [each.status for each in happened if isinstance(each, ViewEnded)] == [ViewStatus.ABORTED]


def test_who_has_passed_the_boundary_does_not() -> None:
    assert not begun().receive(Heartbeat("a", 3, 0, 1, StateVersion(1, 5)), 0.2)


def test_where_all_leave_the_view_is_not_ended_for_them() -> None:
    found = Coordinator(Policy(expected_workers=2, max_workers=3))
    for count, works_in in ((1, 0), (2, 1)):
        for worker in "ab":
            found.receive(Heartbeat(worker, count, works_in, leaving=True), 0.0)
    assert found.update.status is ViewStatus.ACTIVE


def test_a_report_that_is_made_again_counts_twice_as_long() -> None:
    quarrels = UnreachablePairs(5.0)
    quarrels.report("a", ["b"], 0.0)
    quarrels.report("a", ["b"], 1.0)  # the same one
    assert quarrels.active_reports(4.9)
    assert not quarrels.active_reports(5.1)
    quarrels.report("a", ["b", "c"], 6.0)
    assert quarrels.active_reports(15.9) == [("a", frozenset("bc"))]
    assert not quarrels.active_reports(16.1)


def test_who_is_seen_to_compute_is_not_lost_though_it_be_silent() -> None:
    found = Coordinator(Policy(expected_workers=2, max_workers=2))
    for count, works_in in ((1, 0), (2, 1)):
        for worker in "ab":
            found.receive(Heartbeat(worker, count, works_in), 0.0)
    seconds = 0.0
    while seconds < 30.0:
        seconds += 0.3
        found.receive(Heartbeat("a", 3 + round(10 * seconds), 1), seconds)
        found.worker_running("b", seconds)
        found.worker_running("nobody", seconds)
        assert not found.tick(seconds)
    found.receive(Heartbeat("a", 1000, 1), 30.9)
    assert [each.status for each in found.tick(31.0) if isinstance(each, ViewEnded)] == [ViewStatus.ABORTED]


def test_steps_that_are_taken_again_count_again_and_what_a_view_begins_with_does_not() -> None:
    found, counts = Coordinator(Policy(expected_workers=2, max_workers=2)), [StepCount()]

    def hear(workers: str, count: int, step: int = 0, view: int = 0, *, works: bool = True) -> None:
        standing = StateVersion(view, step) if view else StateVersion()
        works_in, ended = (view, 0) if works else (0, found.view.number)
        for worker in workers:
            found.receive(Heartbeat(worker, count, works_in, ended, standing), 0.0)
            if found.step_count != counts[-1]:
                counts.append(found.step_count)

    hear("ab", 1, works=False)
    hear("ab", 2, 40, 1)  # what was kept
    hear("a", 3, 42, 1)
    found.worker_exited("b", 0.0)
    hear("c", 1, works=False)
    hear("a", 4, 43, 1, works=False)  # is heard of only now
    assert found.view.members == ("a", "c")
    hear("ac", 5, 43, 2)
    hear("a", 6, 44, 2)
    for worker in "ac":
        found.worker_exited(worker, 0.0)
    hear("de", 1, works=False)
    hear("d", 2, 40, found.view.number)
    hear("d", 3, 41, found.view.number)
    told = [(0, 0), (0, 40), (2, 42), (3, 43), (4, 44), (4, 0), (4, 40), (5, 41)]
    assert counts == [StepCount(*each) for each in told]


def at_work(first_step_seconds: float) -> Coordinator:
    """Two that have done ten steps a second for a second, after the first, which took longer."""
    found = Coordinator(Policy(expected_workers=2, max_workers=2))
    for count, works_in in ((1, 0), (2, 1)):
        for worker in "ab":
            found.receive(Heartbeat(worker, count, works_in), 0.0)
    for tenth in range(round(10 * first_step_seconds) + 10):
        step = max(0, tenth + 1 - round(10 * first_step_seconds))
        for worker in "ab":
            found.receive(Heartbeat(worker, 3 + tenth, 1, version=StateVersion(1, step)), 0.1 * tenth)
    return found


@pytest.mark.parametrize("first_step_seconds", [0.1, 5.0])
def test_how_long_the_first_step_took_is_no_reason_to_wait_for_who_freezes(first_step_seconds: float) -> None:
    found, frozen = at_work(first_step_seconds), first_step_seconds + 0.9
    for tenth in range(1, 10):
        found.receive(Heartbeat("a", 1000 + tenth, 1, version=StateVersion(1, 10)), frozen + 0.1 * tenth)
        ended = [each.status for each in found.tick(frozen + 0.1 * tenth) if isinstance(each, ViewEnded)]
        if ended:
            break
    assert ended == [ViewStatus.ABORTED]
    assert tenth >= 7  # of Policy.silence_seconds, 0.75


def test_a_worker_that_was_frozen_while_a_group_met_is_not_kept_apart_from_those_who_went_on() -> None:
    found = Coordinator(Policy(expected_workers=2, max_workers=2))
    for worker in "ab":
        found.receive(Heartbeat(worker, 1), 0.0)
    found.receive(Heartbeat("a", 2, 0, 1, failed_view=1), 1.0)  # it did not meet "b"
    found.tick(1.5)
    assert found.view.members == ("a",)
    found.receive(Heartbeat("a", 3, 2, 1), 1.6)
    happened = found.receive(Heartbeat("b", 2, 0, 2, unreachable=("a",), failed_view=1), 2.0)
    assert [(each.status, each.reason) for each in happened if isinstance(each, ViewEnded)] == [
        (ViewStatus.ENDING_AT_BOUNDARY, "b may join")
    ]


def test_a_step_that_a_frozen_worker_held_up_is_not_learned() -> None:
    found, deadline = at_work(0.1), at_work(0.1).step_timeout.deadline_seconds
    for tenth in range(1, 10):  # "b" freezes for a moment
        found.receive(Heartbeat("a", 1000 + tenth, 1, version=StateVersion(1, 10)), 1.0 + 0.1 * tenth)
    for worker in "ab":
        found.receive(Heartbeat(worker, 2000, 1, version=StateVersion(1, 11)), 1.9)
    assert found.view.number == 1
    assert found.update.status is ViewStatus.ACTIVE
    assert found.step_timeout.last == 1.9
    assert found.step_timeout.deadline_seconds == deadline


def test_to_vouch_for_a_worker_is_of_use_once_it_is_late() -> None:
    found = at_work(0.1)
    assert not found.has_late_member(1.0 + 0.2)
    assert found.has_late_member(1.0 + 0.4)
    for worker in "ab":
        found.worker_running(worker, 1.4)
    assert not found.has_late_member(1.5)
    for worker in "ab":
        found.worker_exited(worker, 1.6)
    assert not found.has_late_member(9.0)
