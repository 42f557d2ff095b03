"""Random faults of a virtual cluster, and what must hold after them."""

from __future__ import annotations

import random

from tests.membership.virtual_cluster import World


def settled(world: World, seconds: float = 60.0) -> None:
    """Once all is well again, all who are there (and have a seat) train together before long."""
    world.heal()
    world.run(seconds)
    before = world.steps
    world.run(8.0)
    world.check()
    if world.over:
        world.run(10.0)
        assert not world.present(), "somebody stays when all is done"
        return
    present = world.present()
    if len(present) >= max(world.policy.min_workers, world.policy.replica_size):
        assert world.steps > before, "no progress"
        seats = min(len(present), world.policy.max_workers) // world.policy.replica_size * world.policy.replica_size
        newest = world.views[max(world.views)]
        assert len(newest.members) == seats, "somebody is left out"


FAULTS = ["kill", "kill unseen", "unplug", "freeze", "thaw", "stall", "start", "leave", "part", "join up", "crash",
          "restart", "offline", "hang up"]  # fmt: skip


def befall(world: World, fault: str, pick: random.Random, spare: int) -> None:
    """One fault, on whom `pick` picks; nobody dies who alone has what was committed, or leaves fewer than `spare`."""
    present = world.present()
    if not present:
        return
    name = pick.choice(present)
    match fault:
        case "kill" | "kill unseen" if len(present) > spare and world.is_spare(name):
            world.kill(name, seen=fault == "kill")
        case "unplug" if len(present) > spare and world.is_spare(name):
            world.unplug(name)
        case "stall":
            world.stall(name, pick.uniform(0.1, 4.0))
        case "hang up":
            world.hang_up(name)
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
