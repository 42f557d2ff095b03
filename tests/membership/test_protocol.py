"""The protocol under everything that can happen to it: one view of each number, nothing committed lost, no step done
twice or left out, and training goes on."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.membership.world import Network, World
from unisono.membership import Policy

CALM = Policy(minimum=1, expected=4, maximum=6, patience_seconds=5.0)


def settled(world: World, seconds: float = 60.0) -> None:
    """Once all is well again, all who are there (and have a seat) train together before long."""
    world.heal()
    world.run(seconds)
    before = world.steps
    world.run(8.0)
    world.check()
    present = world.present()
    if len(present) >= max(world.policy.minimum, world.policy.unit):
        assert world.steps > before, "no progress"
        seats = min(len(present), world.policy.maximum) // world.policy.unit * world.policy.unit
        newest = world.views[max(world.views)]
        assert len(newest.members) == seats, "somebody is left out"


def test_without_faults_there_is_one_view() -> None:
    world = World(CALM, 4, seed=0)
    world.run(20.0)
    assert len(world.views) == 1
    assert world.steps > 200
    settled(world, 1.0)


def test_a_death_that_was_seen_costs_no_committed_step_and_a_fraction_of_a_second() -> None:
    world = World(CALM, 4, seed=1)
    world.run(5.0)
    before = world.steps
    world.kill("w2", seen=True)
    world.run(0.5)
    assert world.steps > before
    assert world.views[max(world.views)].members == ("w0", "w1", "w3") or len(world.views[2].members) == 3
    settled(world)


def test_who_joins_is_let_in_at_a_boundary_and_nothing_is_done_twice() -> None:
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


def test_who_leaves_is_let_go_at_a_boundary() -> None:
    world = World(CALM, 4, seed=3)
    world.run(5.0)
    world.leave("w1")
    world.run(1.0)
    assert world.workers["w1"].exited
    assert "w1" not in world.views[max(world.views)].members
    done = [step for (_, step), members in world.applied.items() if members]
    assert len(done) == len(set(done))
    settled(world)


def test_without_the_coordinator_workers_go_on() -> None:
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


def test_two_that_cannot_reach_each_other_do_not_keep_the_rest_from_work() -> None:
    world = World(CALM, 5, seed=6)
    world.run(5.0)
    before = world.steps
    world.part([["w0", "w1", "w2"], ["w3", "w4"]])
    world.run(10.0)
    assert world.steps > before
    assert set(world.views[max(world.views)].members) == {"w0", "w1", "w2"}
    settled(world, 120.0)


def test_replicas_of_two_workers_come_and_go_whole() -> None:
    world = World(Policy(minimum=2, expected=6, maximum=6, unit=2), 6, seed=7)
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
def test_what_only_the_dead_have_is_waited_for_and_then_given_up(seen) -> None:
    """All members of a view die; who stood by knows nothing of what they did."""
    world = World(Policy(minimum=1, expected=2, maximum=2, patience_seconds=8.0), 3, seed=8)
    world.run(5.0)
    for member in world.views[1].members:
        world.kill(member, seen=seen)
    world.run(5.0)
    assert (len(world.views) == 1) is not seen
    world.run(10.0)
    (spare,) = world.present()
    assert world.views[2].members == (spare,)
    assert not world.views[2].sources


def test_what_only_the_frozen_have_is_waited_for() -> None:
    world = World(Policy(minimum=1, expected=2, maximum=2, patience_seconds=60.0), 3, seed=8)
    world.run(5.0)
    for member in world.views[1].members:
        world.freeze(member)
    world.run(20.0)
    assert len(world.views) == 1
    world.thaw(world.views[1].members[0])
    world.run(5.0)
    assert len(world.views) > 1
    settled(world)


FAULTS = ["kill", "kill unseen", "freeze", "thaw", "start", "leave", "part", "join up", "crash", "restart", "offline"]


def befall(world: World, fault: str, pick: random.Random, spare: int) -> None:
    """One fault, on whom `pick` picks; nobody dies who alone has what was committed, or leaves fewer than `spare`."""
    present = world.present()
    if not present:
        return
    name = pick.choice(present)
    match fault:
        case "kill" | "kill unseen" if len(present) > spare and world.is_spare(name):
            world.kill(name, seen=fault == "kill")
        case "freeze":
            world.freeze(name)
        case "thaw":
            world.thaw(name)
        case "start" if len(present) < 8:
            world.start()
        case "leave" if len(present) > spare:
            world.leave(name)
        case "part":
            world.part([present[::2], present[1::2]])
        case "join up":
            world.part([present])
        case "crash":
            world.crash_coordinator()
        case "restart" if world.coordinator is None:
            world.restart_coordinator()
        case "offline":
            world.workers[name].offline = not world.workers[name].offline


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 16),
    unit=st.sampled_from([1, 1, 2]),
    network=st.sampled_from([Network(), Network(lost=0.1), Network(most_seconds=0.6)]),
    faults=st.lists(st.tuples(st.sampled_from(FAULTS), st.floats(0.01, 3.0)), max_size=12),
)
def test_whatever_happens(seed, unit, network, faults) -> None:
    policy = Policy(minimum=unit, expected=4, maximum=6, unit=unit, patience_seconds=20.0, estranged_seconds=1.0)
    world = World(policy, 4, seed, network, step_seconds=0.2)
    pick = random.Random(seed)
    world.run(3.0)
    for fault, seconds in faults:
        befall(world, fault, pick, spare=2)
        world.run(seconds)
    settled(world, 40.0)


@pytest.mark.parametrize("seed", range(30))
def test_deaths_among_many(seed) -> None:
    pick = random.Random(seed)
    world = World(
        Policy(minimum=1, expected=5, maximum=8, patience_seconds=20.0), 5, seed, Network(lost=0.05), step_seconds=0.2
    )
    world.run(3.0)
    for _ in range(15):
        befall(
            world, pick.choice(["kill", "kill unseen", "start", "start", "crash", "restart", "leave"]), pick, spare=3
        )
        world.run(pick.uniform(0.05, 4.0))
    settled(world, 40.0)
