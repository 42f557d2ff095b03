"""The membership protocol under all faults.

There is one view of each number, no committed step is lost, none is done twice or left out, and training continues.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.membership.cluster_faults import FAULTS, inject, settled
from tests.membership.virtual_cluster import Network, World
from unisono.membership import Policy, ViewEnded, ViewStatus

CALM = Policy(min_workers=1, expected_workers=4, max_workers=6, join_timeout_seconds=5.0)


def test_without_faults_there_is_one_view() -> None:
    world = World(CALM, 4, seed=0)
    world.run(20.0)
    assert len(world.views) == 1
    assert world.steps > 200
    settled(world, 1.0)


def test_a_reported_exit_costs_no_committed_step_and_a_fraction_of_a_second() -> None:
    world = World(CALM, 4, seed=1)
    world.run(5.0)
    before = world.steps
    world.kill("w2", seen=True)
    world.run(0.5)
    assert world.steps > before
    assert world.views[max(world.views)].members == ("w0", "w1", "w3") or len(world.views[2].members) == 3
    settled(world)


STEADY = Network(0.01, 0.01)  # every message takes the same time
SELDOM = Policy(
    min_workers=1, expected_workers=4, max_workers=6, heartbeat_seconds=50.0, join_timeout_seconds=300.0
)  # no heartbeat or tick helps


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_recovery_from_an_exit_takes_five_messages_in_sequence(seen, seed) -> None:
    """The exit is reported; the view ends; a survivor aborts its operation; it reports the end; the next view is sent.

    If the exit is not reported, a survivor's report that it lost the others replaces the first two."""
    world = World(SELDOM, 4, seed, STEADY, step_seconds=1.0)
    world.run(30.0)
    assert len(world.views) == 1
    world.kill(world.views[1].members[seed % 4], seen=seen)
    world.run((4.5 if seen else 5.5) * STEADY.most_seconds)
    number = max(world.views)
    assert number == 2
    world.run(1 * STEADY.most_seconds)
    assert {world.workers[m].agent.view.number for m in world.views[2].members} == {2}


def test_a_disconnected_worker_stays_a_member_if_its_next_heartbeat_arrives() -> None:
    world = World(CALM, 4, seed=1)
    world.run(5.0)
    for _ in range(20):
        world.disconnect("w1")
        world.run(0.3)
    assert len(world.views) == 1
    settled(world, 1.0)


def test_a_host_without_power_is_noticed_by_missing_heartbeats() -> None:
    world = World(CALM, 4, seed=1)
    world.run(5.0)
    before = world.steps
    world.unplug("w2")
    world.run(2.5)
    assert world.steps > before
    assert set(world.views[max(world.views)].members) == {"w0", "w1", "w3"}
    settled(world)


def test_workers_that_all_leave_stop_together() -> None:
    world = World(CALM, 4, seed=3)
    world.run(5.0)
    for name in world.present():
        world.leave(name)
        world.run(0.02)
    world.run(3.0)
    assert not world.present()
    assert world.finished
    assert len(world.views) <= 3
    world.check()


def test_a_leaving_worker_is_not_kept_to_reach_the_minimum() -> None:
    world = World(Policy(min_workers=3, expected_workers=3, max_workers=4, join_timeout_seconds=5.0), 3, seed=3)
    world.run(5.0)
    world.leave("w1")
    world.run(2.0)
    assert set(world.present()) == {"w0", "w2"}
    before = world.steps
    world.run(20.0)
    assert world.steps == before, "fewer than the user wants"
    world.start()
    world.run(2.0)
    assert world.steps > before
    settled(world)


def test_the_last_leaving_workers_stop_the_run_even_below_the_minimum() -> None:
    """Only they have the state, and a worker that leaves a run with others saves nothing."""
    world = World(Policy(min_workers=3, expected_workers=3, max_workers=4, join_timeout_seconds=5.0), 3, seed=3)
    world.run(5.0)
    for name in ("w1", "w0", "w2"):
        world.leave(name)
        world.run(2.0)
    assert world.finished
    assert not world.present()
    assert [set(view.members) for view in world.views.values()] == [{"w0", "w1", "w2"}, {"w2"}]
    world.check()


def test_a_worker_may_leave_before_the_first_view() -> None:
    world = World(Policy(min_workers=2, expected_workers=3, max_workers=3, join_timeout_seconds=5.0), 1, seed=3)
    world.run(1.0)
    world.leave("w0")
    world.run(1.0)
    assert not world.present()
    assert not world.views


def test_a_leaving_worker_stays_while_only_it_has_the_state() -> None:
    """The other worker that has it is lost, and the one that joined later has nothing."""
    world = World(Policy(min_workers=1, expected_workers=2, max_workers=2, join_timeout_seconds=50.0), 2, seed=3)
    world.run(5.0)
    world.start()
    world.run(1.0)
    before = world.steps
    world.kill("w0", seen=True)
    world.leave("w1")
    world.run(3.0)
    assert world.present() == ["w2"]
    assert world.steps > before
    assert [set(world.views[number].members) for number in (2, 3)] == [{"w1", "w2"}, {"w2"}]
    settled(world)


def test_a_frozen_worker_that_resumes_rejoins_without_old_state() -> None:
    world = World(CALM, 4, seed=9)
    world.run(5.0)
    world.freeze("w1")
    world.run(60.0)
    before = world.steps
    assert set(world.views[max(world.views)].members) == {"w0", "w2", "w3"}
    world.thaw("w1")
    world.run(3.0)
    assert set(world.views[max(world.views)].members) == {"w0", "w1", "w2", "w3"}
    assert world.views[max(world.views)].start.step >= before
    settled(world)


def noticed_seconds(world: World, name: str, seconds: float) -> float | None:
    """Freezes the worker for `seconds`; returns after how long its view was aborted, if it was."""
    before, began, noticed = len(world.decisions), world.now, None
    world.freeze(name)
    while world.now < began + seconds:
        world.run(0.01)
        aborted = any(
            isinstance(each, ViewEnded) and each.status is ViewStatus.ABORTED for each in world.decisions[before:]
        )
        noticed = world.now - began if aborted and noticed is None else noticed
    world.thaw(name)
    return noticed


PATIENT = Policy(min_workers=1, expected_workers=1, max_workers=16)


@pytest.mark.parametrize(("workers", "step_seconds", "frozen_seconds"), [
    (3, 0.05, 1.2), (3, 0.05, 4.0), (3, 0.05, 20.0), (8, 0.5, 6.0), (16, 1.0, 6.0),
])  # fmt: skip
def test_the_tenth_freeze_is_noticed_as_soon_as_the_first(workers, step_seconds, frozen_seconds) -> None:
    world = World(replace(PATIENT, expected_workers=workers), workers, seed=9, step_seconds=step_seconds)
    world.run(20 * step_seconds)
    for _ in range(10):
        while "w1" not in world.views[max(world.views)].members:  # it is quarantined
            world.run(0.1)
        world.run(2.0 + 2 * step_seconds)
        found = noticed_seconds(world, "w1", frozen_seconds)
        assert found is not None
        assert found <= 3 * 1.5 * step_seconds + 1.0  # three of the longest steps
    settled(world)


@pytest.mark.parametrize("workers", [3, 8])
def test_repeated_freezes_cost_the_others_less_than_a_tenth(workers) -> None:
    steps = []
    for frozen_seconds in (0.0, 4.0):
        world = World(replace(PATIENT, expected_workers=workers), workers, seed=9)
        world.run(5.0)
        for _ in range(10):
            noticed_seconds(world, "w1", frozen_seconds)
            world.run(12.0 - frozen_seconds)
        steps.append(world.steps)
    assert steps[1] >= 0.9 * steps[0]
    settled(world)


def test_quarantines_grow_with_repeated_freezes() -> None:
    world = World(replace(PATIENT, expected_workers=8), 8, seed=9)
    world.run(5.0)
    away = []
    for _ in range(6):
        noticed_seconds(world, "w1", 2.0)
        began = world.now
        while "w1" not in world.views[max(world.views)].members:
            world.run(0.1)
        away.append(world.now - began)
        world.run(1.0)
    assert [round(seconds) for seconds in away] == [0, 1, 2, 4, 8, 16]
    settled(world)


def test_workers_that_freeze_together_are_quarantined_together() -> None:
    world = World(replace(PATIENT, expected_workers=4), 4, seed=9)
    world.run(5.0)
    for _ in range(2):
        world.freeze("w2")
        noticed_seconds(world, "w1", 2.0)
        world.thaw("w2")
        world.run(0.5)
    assert set(world.views[max(world.views)].members) == {"w0", "w3"}
    settled(world)


def test_a_worker_that_the_minimum_needs_is_not_quarantined() -> None:
    world = World(Policy(min_workers=3, expected_workers=3, max_workers=3), 3, seed=9)
    world.run(5.0)
    for _ in range(5):
        assert noticed_seconds(world, "w1", 2.0)
        before = world.steps
        world.run(1.0)
        assert world.steps > before
    settled(world)


def test_an_exit_during_gathering_does_not_delay_the_next_view() -> None:
    """The connections of the first close; the second exits after it has ended the view, or before."""
    for moment in (0.005, 0.015, 0.025, 0.035):
        world = World(SELDOM, 4, 2, STEADY, step_seconds=1.0)
        world.run(30.0)
        first, second, *others = world.views[1].members
        world.kill(first, seen=True)
        world.run(moment)
        world.kill(second, seen=True)
        world.run(0.2)
        assert list(world.views[max(world.views)].members) == others
        assert {world.workers[m].agent.view.number for m in others} == {max(world.views)}


def test_the_next_view_does_not_wait_for_a_replacement() -> None:
    """It starts while the survivors gather; they continue at once, and it joins at the next boundary."""
    world = World(SELDOM, 4, 2, STEADY, step_seconds=1.0)
    world.run(30.0)
    first = world.views[1].members[0]
    world.kill(first, seen=True)
    world.start()
    world.run(0.055)
    assert first not in world.views[2].members
    assert {"w1", "w2", "w3"} - {first} <= set(world.views[2].members)
    for _ in range(2):  # a real worker waits for news; a virtual one asks only when a heartbeat is due
        world._send_heartbeat(world.workers["w4"])
        world.run(3.0)
    assert "w4" in world.views[max(world.views)].members


def test_without_enough_workers_nothing_is_trained() -> None:
    world = World(Policy(min_workers=3, expected_workers=4, max_workers=6, join_timeout_seconds=2.0), 2, seed=11)
    world.run(20.0)
    assert not world.views
    world.start()
    world.run(3.0)
    assert world.steps
    world.kill("w0", seen=True)
    world.run(1.0)
    before = world.steps
    world.run(30.0)
    assert world.steps == before
    world.start()
    world.run(2.0)
    assert world.steps > before
    settled(world)


@pytest.mark.parametrize("crash", [False, True])
def test_when_a_worker_has_the_result_no_worker_trains(crash) -> None:
    world = World(CALM, 5, seed=12, total=100)
    while not world.finished:
        world.run(0.01)
    views = len(world.views)
    if crash:
        world.crash_coordinator()
        world.run(0.5)
        world.restart_coordinator()
    newcomer = world.start()
    world.kill(world.present()[0], seen=True)
    world.run(5.0)
    assert not world.present()
    assert newcomer in world.workers
    assert len(world.views) == views
    assert world.steps == 100
    world.check()


def test_views_have_the_addresses_of_members() -> None:
    world = World(CALM, 4, seed=1)
    world.run(5.0)
    world.start()
    world.run(2.0)
    for view in world.views.values():
        assert [address.host for address in view.addresses] == [f"host of {member}" for member in view.members]


def test_a_worker_joins_at_a_boundary_and_no_step_is_repeated() -> None:
    world = World(CALM, 4, seed=2)
    world.run(5.0)
    before = world.steps
    world.start()
    world.run(1.0)
    newest = world.views[max(world.views)]
    assert len(newest.members) == 5
    assert newest.start.step >= before
    done = [step for (_, step), members in world.applied.items() if members]
    assert len(done) == len(set(done)), "a boundary is no reason to do a step again"
    settled(world)


def test_a_worker_leaves_at_a_boundary() -> None:
    world = World(CALM, 4, seed=3)
    world.run(5.0)
    world.leave("w1")
    world.run(1.0)
    assert world.workers["w1"].exited
    assert "w1" not in world.views[max(world.views)].members
    done = [step for (_, step), members in world.applied.items() if members]
    assert len(done) == len(set(done))
    settled(world)


def test_workers_continue_without_the_coordinator() -> None:
    world = World(CALM, 4, seed=4)
    world.run(5.0)
    world.crash_coordinator()
    before = world.steps
    world.run(10.0)
    assert world.steps > before + 100
    world.restart_coordinator()
    world.run(10.0)
    assert len(world.views) == 1
    settled(world)


def test_a_worker_that_only_the_coordinator_cannot_reach_stays() -> None:
    world = World(CALM, 4, seed=5)
    world.run(5.0)
    world.workers["w3"].offline = True
    world.run(10.0)
    assert len(world.views) == 1


def test_unreachable_pairs_do_not_stop_the_other_workers() -> None:
    world = World(CALM, 5, seed=6)
    world.run(5.0)
    before = world.steps
    world.split_network([["w0", "w1", "w2"], ["w3", "w4"]])
    world.run(10.0)
    assert world.steps > before
    assert set(world.views[max(world.views)].members) == {"w0", "w1", "w2"}
    settled(world, 120.0)


def test_replicas_of_two_workers_join_and_leave_complete() -> None:
    world = World(Policy(min_workers=2, expected_workers=6, max_workers=6, replica_size=2), 6, seed=7)
    world.run(5.0)
    first = world.views[1].members
    world.kill(first[2], seen=True)
    world.run(2.0)
    assert world.views[max(world.views)].members == (*first[:2], *first[4:])
    world.start()
    world.run(3.0)
    newest = world.views[max(world.views)].members
    assert newest[:4] == (*first[:2], *first[4:])
    assert newest[4] == first[3]
    settled(world)


@pytest.mark.parametrize("seen", [True, False])
def test_steps_that_only_lost_workers_have_are_awaited_and_then_abandoned(seen) -> None:
    """All members of a view are lost; a spare has none of their steps."""
    world = World(Policy(min_workers=1, expected_workers=2, max_workers=2, join_timeout_seconds=8.0), 3, seed=8)
    world.run(5.0)
    for member in world.views[1].members:
        world.kill(member, seen=seen)
    world.run(5.0)
    assert (len(world.views) == 1) is not seen
    world.run(10.0)
    (spare,) = world.present()
    assert world.views[2].members == (spare,)
    assert not world.views[2].sources


def test_steps_that_only_frozen_workers_have_are_awaited() -> None:
    world = World(Policy(min_workers=1, expected_workers=2, max_workers=2, join_timeout_seconds=60.0), 3, seed=8)
    world.run(5.0)
    for member in world.views[1].members:
        world.freeze(member)
    world.run(20.0)
    assert len(world.views) == 1
    world.thaw(world.views[1].members[0])
    world.run(5.0)
    assert len(world.views) > 1
    settled(world)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 16),
    unit=st.sampled_from([1, 1, 2]),
    network=st.sampled_from([Network(), Network(lost=0.1), Network(most_seconds=0.6)]),
    faults=st.lists(st.tuples(st.sampled_from(FAULTS), st.floats(0.01, 3.0)), max_size=12),
    total=st.sampled_from([None, None, 20, 60]),
)
def test_random_faults(seed, unit, network, faults, total) -> None:
    policy = Policy(
        min_workers=unit,
        expected_workers=4,
        max_workers=6,
        replica_size=unit,
        join_timeout_seconds=20.0,
        quarantine_seconds=1.0,
    )
    world = World(policy, 4, seed, network, step_seconds=0.2, total=total)
    pick = random.Random(seed)
    world.run(3.0)
    for fault, seconds in faults:
        inject(world, fault, pick, spare=2)
        world.run(seconds)
    settled(world, 40.0)


@given(seed=st.integers(0, 1 << 16), faults=st.lists(st.sampled_from(FAULTS), min_size=1, max_size=4))
@settings(max_examples=15)
def test_faults_near_the_end_of_the_run(seed, faults) -> None:
    """Faults just before the end, and while it is reported."""
    world = World(
        Policy(min_workers=1, expected_workers=4, max_workers=6, join_timeout_seconds=20.0), 4, seed, total=40
    )
    pick = random.Random(seed)
    while world.steps < 38:
        world.run(0.05)
    for fault in faults:
        inject(world, fault, pick, spare=2)
        world.run(pick.uniform(0.01, 0.1))
    settled(world, 60.0)
    stopped = "leave" in faults
    assert not world.finished or stopped or max(worker.state.step for worker in world.workers.values()) == 40


@pytest.mark.parametrize("seed", range(30))
def test_many_exits(seed) -> None:
    pick = random.Random(seed)
    world = World(
        Policy(min_workers=1, expected_workers=5, max_workers=8, join_timeout_seconds=20.0),
        5,
        seed,
        Network(lost=0.05),
        step_seconds=0.2,
    )
    world.run(3.0)
    for _ in range(15):
        inject(
            world, pick.choice(["kill", "kill unseen", "start", "start", "crash", "restart", "leave"]), pick, spare=3
        )
        world.run(pick.uniform(0.05, 4.0))
    settled(world, 40.0)
