"""A launcher for tests to kill: ``python -m tests.support.toy_launcher MARKER LOGS TARGET [PRELOAD …]``.

Prints ``starting``, then one line per running worker; exits with the code of its interruption.
"""

from __future__ import annotations

import sys
from pathlib import Path

from unisono.launch import Interrupted, LaunchOptions, launch


def main(marker: str, logs: str, target: str, *preload: str) -> int:
    print("starting", flush=True)
    try:
        launch(
            f"tests.support.launch_targets:{target}",
            (),
            LaunchOptions(Path(logs), 3, preload=preload, name=marker, stop_seconds=1.0),
            on_message=lambda rank, message: print("running", rank, flush=True),
        )
    except Interrupted as error:
        print("interrupted", list(error.results), flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
