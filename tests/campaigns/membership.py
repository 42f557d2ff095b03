"""Runs the membership protocol under random faults, over many seeds or with thousands of workers.

    python -m tests.campaigns.membership --seeds 1000
    python -m tests.campaigns.membership --workers 4096

A seed that fails is printed, and reproduces the same cluster.
"""

from __future__ import annotations

import argparse
import random

from tests.membership.cluster_faults import FAULTS, inject, settled
from tests.membership.virtual_cluster import Network, World
from unisono.membership import Policy


def play(seed: int, workers: int, faults: int) -> World:
    """One cluster with random faults, of which at least two thirds of the workers remain."""
    pick = random.Random(seed)
    interval = max(0.1, workers / 4096)
    policy = Policy(
        min_workers=1,
        expected_workers=workers,
        max_workers=workers + workers // 2,
        join_timeout_seconds=200 * interval,
        heartbeat_seconds=interval,
        heartbeats_per_second=4096,
    )
    world = World(policy, workers, seed, Network(lost=pick.choice([0.0, 0.05])), step_seconds=2 * interval)
    world.run(30 * interval)
    for _ in range(faults):
        inject(world, pick.choice(FAULTS), pick, spare=workers * 2 // 3)
        world.run(pick.uniform(0.5, 40) * interval)
    settled(world, 400 * interval)
    return world


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--faults", type=int, default=15)
    asked = parser.parse_args()
    failed = []
    for seed in range(asked.first, asked.first + asked.seeds):
        try:
            world = play(seed, asked.workers, asked.faults)
            print(f"seed {seed}: {len(world.views)} views, {world.steps} steps", flush=True)
        except AssertionError as error:
            failed.append(seed)
            print(f"seed {seed}: FAILED: {error}", flush=True)
    print(f"failed: {failed or 'none'}")
    raise SystemExit(bool(failed))
