"""A toy training run for the kill campaign: ``python -m tests.support.toy_training DIRECTORY STEPS``.

Worker 0 counts steps in a file, which it replaces at every step; a later start continues from it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from unisono.launch import Interrupted, LaunchOptions, WorkerContext, launch


def count(worker: WorkerContext, directory: str, steps: int) -> None:
    state = Path(directory) / f"count-{worker.identity.rank}"
    step = int(state.read_text()) if state.exists() else 0
    while step < steps and not worker.stop.requested:
        time.sleep(0.01)
        step += 1
        fresh = state.with_suffix(".new")
        fresh.write_text(str(step))
        os.replace(fresh, state)


def main(directory: str, steps: str) -> int:
    Path(directory).mkdir(exist_ok=True)
    logs = Path(directory) / "logs"
    target = "tests.support.toy_training:count"
    try:
        launch(target, (directory, int(steps)), LaunchOptions(logs, 2, preload=(), stop_seconds=5.0))
    except Interrupted as error:
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
