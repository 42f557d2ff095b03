"""Kills workers in quick succession, most of them replacements that have just started.

    python -m tests.campaigns.lost_workers --seed 1 --trials 3
    python -m tests.campaigns.lost_workers --kills 6 shard LocalSGD

Each run must end with the result of a run without faults, or with a message that says why it cannot continue.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.campaigns.lost_workers.runs import KINDS, trial


def main() -> int:
    """1 if anything was wrong."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--seed", type=int, default=0, help="of the first trial")
    given.add_argument("--trials", type=int, default=3, help="of each kind")
    given.add_argument("--kills", type=int, default=4, help="in each trial")
    given.add_argument("--heirs", type=float, default=0.8, help="share of the kills that hit the last replacement")
    given.add_argument("--keep", type=Path, help="where the runs are to lie")
    given.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; default: all")
    asked = given.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        for name in asked.kinds or KINDS:
            for seed in range(asked.seed, asked.seed + asked.trials):
                at = (asked.keep or Path(directory)) / name.replace(", ", "-")
                came = trial(KINDS[name], seed, at, asked.kills, asked.heirs)
                struck = ", ".join(f"{each['worker']} after {each['step']}" for each in came.strikes)
                verdict = came.wrong or ("given up, in words" if came.given_up else "right")
                print(f"{name}, seed {seed}: {verdict} ({struck}; {came.seconds:.0f} s)", flush=True)
                wrong += bool(came.wrong)
    print(f"{wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
