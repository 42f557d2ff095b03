"""A custom training loop over `tally`; each worker writes its result into the directory RUN.

unisono launch tests/campaigns/lost_workers/loop.py RUN OVER SYNC
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import unisono
from tests.campaigns.lost_workers.tasks import BATCH, STEPS, paced, tally


def main(run: Path, over: str, sync: unisono.sync.Synchronizer) -> None:
    """Train."""
    world = unisono.join(threads=1, device="cpu")
    task, pace = tally(), paced(over)
    model = task.model()
    model, optimizer = world.bind(model, task.optimizer(model.parameters()), sync=sync, compress=unisono.Exact())
    for batches in world.steps(task.data, global_batch=BATCH, micro_batch=4, steps=STEPS, seed=1):
        optimizer.zero_grad()
        pace(batches.step, STEPS)
        for batch in batches:
            task.loss(model(task.inputs(batch)), batch).backward()
        if optimizer.step() and world.rank == 0:
            with (run / "events.jsonl").open("a") as file:
                file.write(json.dumps({"event": "step", "step": batches.step + 1}) + "\n")
    told = {"seen": model.seen.tolist(), "step": batches.step + 1}
    (run / f"told-{os.environ['UNISONO_RANK']}.json").write_text(json.dumps(told))
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], eval(f"unisono.{sys.argv[3]}"))  # noqa: S307
