"""As `tests.support.toy_launcher`, with workers that join and leave.

python -m tests.support.toy_elastic_launcher MARKER DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

from unisono.launch import CoordinatorProcess, ElasticOptions, Interrupted, LaunchOptions, launch
from unisono.membership import CoordinatorAddress, Policy
from unisono.membership.endpoint import Endpoint


def main(marker: str, directory: str, *_: str) -> int:
    print("starting", flush=True)
    here, policy = Path(directory), Policy(expected_workers=3, max_workers=3, heartbeat_seconds=2.0)
    state, log = here / "state", here / "coordinator.log"
    with CoordinatorProcess(Endpoint(), policy, state, "a token", log, print, marker) as coordination:
        contact = CoordinatorAddress(coordination.url, "a token")
        try:
            launch(
                "tests.support.elastic_targets:train",
                (contact, str(here / "finish")),
                LaunchOptions(
                    here / "logs", 3, preload=("tests.support.elastic_targets",), name=marker, stop_seconds=5.0
                ),
                on_message=lambda rank, message: "members" in message and print("running", rank, flush=True),
                elastic=ElasticOptions(contact, coordination),
            )
        except Interrupted as error:
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
