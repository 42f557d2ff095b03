"""A coordinator for `workers` workers, as a launcher starts it. Prints its address; ends when its input is closed.

Run by `benchmarks.elasticity.coordinator`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from pathlib import Path

from unisono.membership.endpoint import Endpoint
from unisono.membership.protocol import Policy
from unisono.membership.server.http_server import CoordinatorServer

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workers", type=int)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        policy = Policy(
            min_workers=1, expected_workers=asked.workers, max_workers=2 * asked.workers, join_timeout_seconds=120.0
        )
        serving = CoordinatorServer(Endpoint(), policy, Path(folder, "state"), os.environ["UNISONO_TOKEN"])

        def until_input_closes() -> None:
            sys.stdin.read()
            serving.stop()

        threading.Thread(target=until_input_closes, daemon=True).start()
        print(serving.url, flush=True)
        serving.run()
