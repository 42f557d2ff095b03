"""Random faults of a virtual cluster, and what must hold after them."""

from __future__ import annotations

import random

from tests.membership.virtual_cluster import World


def settled(world: World, seconds: float = 60.0) -> None:
    """After the end of all faults, all workers (up to the maximum) soon train together."""
    world.heal()
    world.run(seconds)
    before = world.steps
    world.run(8.0)
    world.check()
    if world.finished:
        world.run(10.0)
        assert not world.present(), "a worker stays after the end of the run"
        return
    present = world.present()
    if len(present) >= max(world.policy.min_workers, world.policy.replica_size):
        assert world.steps > before, "no progress"
        expected = min(len(present), world.policy.max_workers) // world.policy.replica_size * world.policy.replica_size
        newest = world.views[max(world.views)]
        assert len(newest.members) == expected, "a worker is left out"


FAULTS = ["kill", "kill unseen", "unplug", "freeze", "thaw", "stall", "start", "leave", "split", "join up", "crash",
          "restart", "offline", "disconnect"]  # fmt: skip


def inject(world: World, fault: str, pick: random.Random, spare: int) -> None:
    """Inject a fault into a worker that `pick` chooses; none exits that alone has committed steps, or leaves fewer than
    `spare`."""
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
        case "disconnect":
            world.disconnect(name)
        case "freeze":
            world.freeze(name)
        case "thaw":
            world.thaw(name)
        case "start" if len(present) < 8:
            world.start()
        case "leave" if len(present) > spare:
            world.leave(name)
        case "split":
            world.split_network([present[::2], present[1::2]])
        case "join up":
            world.split_network([present])
        case "crash":
            world.crash_coordinator()
        case "restart" if world.coordinator is None:
            world.restart_coordinator()
        case "offline":
            world.workers[name].offline = not world.workers[name].offline
