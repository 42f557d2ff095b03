"""Stall diagnosis: for each case, the message names the worker, its activity, the line, and what to do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.observe.activity import Activity, Phase
from unisono.observe.stall_diagnosis import Liveness, MemberStatus, Stall, diagnose

STALL = Stall(57, 6.0, 0.31)
SUM = "sum (gradients, message 114)"


def waiting(rank: int, operation: str = SUM, line: str = "loop.py:31 step", age: float = 0.1) -> MemberStatus:
    activity = Activity(Phase.COMMUNICATION, 57, 2, 5.0, operation, (), line)
    return MemberStatus(f"w{rank}", Liveness.RESPONSIVE, age, activity)


def busy(rank: int, phase: Phase, liveness: Liveness = Liveness.RESPONSIVE, age: float = 0.5) -> MemberStatus:
    return MemberStatus(f"w{rank}", liveness, age, Activity(phase, 57, 2, 5.25, "", (), "own.py:12 work"))


@pytest.mark.parametrize(("member", "texts"), [
    (busy(1, Phase.DATA), ["waiting for data for 5.8 s at own.py:12 work", "Processes(n)"]),
    (busy(1, Phase.COMPUTE), ["worker w1 has not arrived, computing for 5.8 s at own.py:12 work", "a lock"]),
    (busy(1, Phase.CHECKPOINT), ["worker w1 has not arrived, writing a checkpoint for 5.8 s", "is it full"]),
    (busy(1, Phase.EVALUATION), ["evaluating for 5.8 s", "--evaluate-every"]),
    (busy(1, Phase.RECOVERY), ["receiving the state for 5.8 s", "its network link"]),
    (busy(1, Phase.COMPUTE, Liveness.UNRESPONSIVE), [
        "worker w1 is frozen or cut off, without a report for 0.5 s", "computing at own.py:12 work", "stopped"]),
    (busy(1, Phase.COMPUTE, Liveness.EXITED), ["the process of worker w1 has exited", "own log"]),
])  # fmt: skip
def test_a_missing_member_is_named_with_its_activity_line_time_and_advice(member, texts) -> None:
    (found,) = diagnose(STALL, [waiting(0), member, waiting(2)])
    assert found.worker == "w1"
    assert found.text.startswith("step 57 is not done after 6 s (usually 0.31 s): ")
    assert f"workers w0, w2 wait for it in {SUM} at loop.py:31 step" in found.text
    for part in texts:
        assert part in found.text


def test_a_frozen_worker_that_waited_has_not_arrived() -> None:
    frozen = MemberStatus("w1", Liveness.UNRESPONSIVE, 3.0, waiting(1).activity)
    (found,) = diagnose(STALL, [waiting(0), frozen])
    assert found.worker == "w1"
    assert "worker w0 waits for it" in found.text


def test_if_all_wait_for_the_same_operation_the_network_is_the_cause() -> None:
    (found,) = diagnose(STALL, [waiting(0), waiting(1)])
    assert found.worker == ""
    assert f"all 2 workers wait for {SUM}" in found.text
    assert "network" in found.text


@pytest.mark.parametrize(("members", "odd"), [
    ([waiting(0), waiting(1, "gather (batchnorm, message 3)", "model.py:5 forward"), waiting(2)], "w1"),
    ([waiting(0), waiting(1, "gather (batchnorm, message 3)", "model.py:5 forward")], ""),
])  # fmt: skip
def test_if_members_wait_for_different_operations_both_lines_are_named(members, odd) -> None:
    (found,) = diagnose(STALL, members)
    assert found.worker == odd
    assert f"worker w0 is waiting for {SUM} at loop.py:31 step" in found.text
    assert "worker w1 is waiting for gather (batchnorm, message 3) at model.py:5 forward" in found.text
    assert "branch" in found.text


def test_of_many_missing_members_a_few_are_named_and_the_rest_counted() -> None:
    found = diagnose(STALL, [waiting(0), *(busy(rank, Phase.DATA) for rank in range(1, 20))])
    assert [each.worker for each in found] == ["w1", "w2", "w3", "w4", ""]
    assert found[-1].text == "15 more workers have not arrived either"


ACTIVITIES = st.builds(Activity, st.sampled_from(Phase), st.integers(0, 9), st.integers(-1, 9), st.floats(0, 1e9),
                   st.sampled_from(["", SUM]), st.just(()), st.sampled_from(["", "a.py:1 f"]))  # fmt: skip
MEMBERS = st.builds(MemberStatus, st.just("w"), st.sampled_from(Liveness), st.floats(0, 1e9), ACTIVITIES)


@given(st.lists(MEMBERS, min_size=1, max_size=12), st.floats(0, 1e9), st.floats(0, 1e9))
def test_every_stall_has_findings_of_bounded_length(members, seconds, usual) -> None:
    found = diagnose(Stall(1, seconds, usual), members)
    assert 1 <= len(found) <= 5
    assert all(len(each.text) < 2000 for each in found)
