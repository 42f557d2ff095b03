"""Kills a worker of the only replica and adds another: the result has the same bits, under each layout.

With ``--sync``, two replicas take local steps, with an optimizer without state.

    python -m tests.campaigns.sharded --seed 1
    python -m tests.campaigns.sharded --seed 1 --sync 'DiLoCo(every=4)'
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.elastic.sharded.runs import under_way

LAYOUTS = (
    "Layout(shard=2)", "Layout(shard=2, zero=1)", "Layout(tensor=2)", "Layout(pipeline=2)", "Layout(context=2)",
    "Layout(replicate=2, shard=2)", "Layout(shard=2, tensor=2)", "Layout(shard=2, pipeline=2)",
)  # fmt: skip
STEPS = 24


def main() -> int:
    """1 if anything differed."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--seed", type=int, default=0)
    given.add_argument("--sync", default="AllReduce()", help="other than this: of two replicas that walk")
    given.add_argument("layouts", nargs="*", default=LAYOUTS)
    options = given.parse_args()
    chance, wrong = random.Random(options.seed), 0
    for layout in options.layouts:
        with tempfile.TemporaryDirectory() as directory:
            words = lose_one(layout, Path(directory), chance, options.sync)
        print(layout, words or "the same", flush=True)
        wrong += bool(words)
    return int(wrong > 0)


def lose_one(layout: str, path: Path, chance: random.Random, sync: str) -> str:
    """What differs; empty if nothing does."""
    workers = (4 if layout.count("=2") > 1 else 2) * (1 if sync == "AllReduce()" else 2)
    optimizer = "sgd" if sync == "AllReduce()" else "plain"
    settings = {"optimizer": optimizer, "layout": layout, "sync": sync, "steps": STEPS, "min_workers": workers}
    with under_way("gpt", path / "calm", workers, **settings) as run:
        calm = run.result()["weights_sha256"], run.losses[STEPS]
    with under_way("gpt", path / "rough", workers, **settings) as run:
        run.until(chance.randrange(6, STEPS - 6))  # there are copies, and replicas that walk have met
        lost = run.members[chance.randrange(workers)]
        run.kill(lost)
        run.start([f"{lost}.2"])
        rough = run.result()["weights_sha256"], run.losses[STEPS]
        events = run.events("view")
    went_on = [event["step"] for event in events]
    print(f"{lost} was lost, and training went on from step {went_on}")
    if not went_on or not went_on[-1]:
        return "it began anew"
    return "" if rough == calm else f"{rough} and not {calm}"


if __name__ == "__main__":
    sys.exit(main())
