"""Every model under every layout against one worker, and every layout after every other.

    python -m tests.layouts                              # all of it
    python -m tests.layouts --only 'bert adamw .*context'
    python -m tests.layouts --quick                      # what the test suite runs

A line per run says what it came to: by how much the losses of its steps differ at most from those of one worker on the
same micro-batches, or in which words it was refused; and whether that is what is expected.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.layouts.cells import SAME, Bench, expected
from tests.layouts.pairs import Resumed, pairs
from tests.layouts.short import CELLS, PAIRS

Try = Callable[[], tuple[bool, str]]  # whether it is as expected, and in words


def tries(directory: Path, quick: bool) -> Iterator[tuple[str, Try]]:
    """All that is to be tried, by name."""
    bench, resumed = Bench(directory / "cells"), Resumed(directory / "pairs")
    resumed.path.mkdir()

    def cell(of, word: str) -> tuple[bool, str]:
        outcome = bench.outcome(of)
        return outcome.is_what(word), str(outcome)

    def pair(of) -> tuple[bool, str]:
        differs, same = resumed.differs(of)
        return same and differs <= SAME, f"{differs:.1e}, {'the same' if same else 'OTHER'} weights"

    for of, word in expected().items():
        if not quick or of in CELLS:
            yield str(of), lambda of=of, word=word: cell(of, word)
    for of in pairs():
        if not quick or of in PAIRS:
            yield str(of), lambda of=of: pair(of)


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
