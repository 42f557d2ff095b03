"""Runs all training loops of `tests.end_to_end.loop_cases` in processes, and under DistributedDataParallel beside it.

    python -m tests.campaigns.loop_cases                        # all of it
    python -m tests.campaigns.loop_cases --only 'gan|scaler'
    python -m tests.campaigns.loop_cases --ways ddp:2           # DistributedDataParallel alone

One line per case: what came of it with data of its own and with the data of `World.steps`, on 1, 2 and 3 workers, and
under DistributedDataParallel on 2. Below it is what was refused or not expected, in words. The exit code is 1 if a
world did not what is expected of it.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path

from tests.end_to_end.loop_cases import CASES, Case, Expected
from tests.end_to_end.loop_cases.comparison import Verdict, in_processes

WAYS = ("own:1", "own:2", "own:3", "steps:1", "steps:2", "steps:3", "ddp:2")
WIDTH = 11


def expected(case: Case, way: str) -> Expected | None:
    """What is expected of a case; None under DistributedDataParallel, which is only shown."""
    form = way.partition(":")[0]
    return None if form == "ddp" else case.expected(form)


def conduct(case: Case, way: str, directory: Path) -> tuple[Verdict, bool]:
    """What came of it, and whether that is wrong."""
    form, _, size = way.partition(":")
    verdict = in_processes(case, form, int(size), directory)
    wanted = expected(case, way)
    return verdict, wanted is not None and not verdict.fits(wanted, int(size))


def main() -> int:
    """Returns whether anything was not as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression in the name of the case")
    parser.add_argument("--ways", nargs="+", default=WAYS, metavar="WAY", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--fast", action="store_true", help="leave out cases that take seconds")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}  # of workers
    logging.getLogger("unisono").setLevel(logging.ERROR)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    wrong, began = 0, time.monotonic()
    print(f"{'':44}" + "".join(f"{way:{WIDTH}}" for way in given.ways))
    with tempfile.TemporaryDirectory(prefix="loops-") as directory:
        for name, case in CASES.items():
            if not re.search(given.only, name) or (given.fast and case.slow):
                continue
            said: dict[str, list[str]] = defaultdict(list)
            print(f"{name:44}", end="", flush=True)
            for way in given.ways:
                if expected(case, way) is Expected.ABSENT:
                    print(f"{'-':{WIDTH}}", end="", flush=True)
                    continue
                at = Path(directory, f"{name}-{way.replace(':', '-')}")
                at.mkdir()
                verdict, bad = conduct(case, way, at)
                wrong += bad
                counts[way][verdict.kind.value] += 1
                if verdict.words:
                    said[f"{'WRONG ' if bad else ''}{verdict}"].append(way)
                print(f"{verdict.kind.value + ' !' * bad:{WIDTH}}", end="", flush=True)
            print()
            for words, ways in said.items():
                print(f"    {', '.join(ways)}: {' '.join(words.split())[:400]}", flush=True)
    for way in given.ways:
        print(f"{way}: " + ", ".join(f"{count} {kind}" for kind, count in counts[way].most_common()))
    print(f"{len(CASES)} cases; {wrong} results were not as expected; {time.monotonic() - began:.0f} s")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
