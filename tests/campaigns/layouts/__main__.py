"""Compares every model under every layout with one worker, and resumes every layout from every other.

    python -m tests.campaigns.layouts                              # all of it
    python -m tests.campaigns.layouts --only 'bert adamw .*context'
    python -m tests.campaigns.layouts --quick                      # what the test suite runs

One line per run: the largest difference between its losses and those of one worker on the same micro-batches, or the
message with which it was refused; and whether that is expected.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.campaigns.layouts.cells import SAME, Bench, Cell, expected
from tests.campaigns.layouts.resume_pairs import Pair, Resumed, pairs
from tests.campaigns.layouts.suite_subset import CELLS, CORNERS, PAIRS, STEPS

Try = Callable[[], tuple[bool, str]]  # whether it is as expected, and in words


def tries(directory: Path, quick: bool) -> Iterator[tuple[str, Try]]:
    """All that is to be tried, by name."""
    bench = Bench(directory / "cells", STEPS) if quick else Bench(directory / "cells")
    resumed = Resumed(directory / "pairs")
    resumed.path.mkdir()
    for cell, word in expected().items():
        if not quick or cell in (*CELLS, *CORNERS):
            yield str(cell), partial(_cell, bench, cell, word)
    for pair in pairs():
        if not quick or pair in PAIRS:
            yield str(pair), partial(_pair, resumed, pair)


def _cell(bench: Bench, cell: Cell, word: str) -> tuple[bool, str]:
    outcome = bench.outcome(cell)
    return outcome.is_what(word), str(outcome)


def _pair(resumed: Resumed, pair: Pair) -> tuple[bool, str]:
    differs, same = resumed.differs(pair)
    return same and differs <= SAME, f"{differs:.1e}, {'the same' if same else 'OTHER'} weights"


def main() -> int:
    """Returns how many are not as expected, at most 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="what the test suite runs")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression in the name of the run")
    given = parser.parse_args()
    wrong, count, began = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="layouts-") as directory:
        for name, attempt in tries(Path(directory), given.quick):
            if re.search(given.only, name):
                good, words = _tried(attempt)
                wrong, count = wrong + (not good), count + 1
                print(f"{name:64} {'' if good else 'WRONG: '}{words}", flush=True)
    print(f"{count - wrong} of {count} as expected, {time.monotonic() - began:.0f} s")
    return min(wrong, 1)


def _tried(attempt: Try) -> tuple[bool, str]:
    try:
        return attempt()
    except Exception:  # the campaign goes on to the next
        return False, traceback.format_exc()


if __name__ == "__main__":
    sys.exit(main())
